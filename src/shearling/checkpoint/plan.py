"""A measurement on disk: the orders and curves of method `surgeon`, in safetensors with a JSON header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shearling.errors import CheckpointError, InputError
from shearling.methods import Surgeon
from shearling.models.structure import structure_of
from shearling.pipeline import Plan
from shearling.sample import accepted_inputs, sample_of
from shearling.surgeon.order import Order

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_plan(plan: Plan, path: Path) -> Path:
    """Write the measurement; the model and the sample are not in it."""
    if not isinstance(plan.method, Surgeon):
        raise InputError(f"Only plans of method surgeon can be saved; this one is of method {plan.method.name}.")
    tensors = {}
    for number, order in enumerate(plan.evidence):
        tensors[f"{number}.removed"], tensors[f"{number}.error"] = order.removed, order.error
    header = {
        "sizes": plan.structure.sizes,
        "lengths": plan.lengths,
        "seed": plan.seed,
        "seconds": dict(plan.seconds),
        "fingerprint": plan.sample.fingerprint,
        "warnings": plan.warnings,
        "method": {"refit": plan.method.refit, "labels": plan.method.labels},
    }
    partial = path.with_name(path.name + ".part")
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata={"shearling": json.dumps(header)})
    partial.replace(path)
    return path


def load_plan(path: str | os.PathLike[str], model: PreTrainedModel, data: Any, *, samples: int | None = None) -> Plan:
    """A saved measurement with the model and the sample it was made of (the refit needs both again)."""
    structure = structure_of(model)
    sample = sample_of(data, limit=samples, accepts=accepted_inputs(model))
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["shearling"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if header["sizes"] != structure.sizes:
            raise CheckpointError(f"{path} was measured on another model: it has {header['sizes']} units per layer.")
        orders = [Order(tensors[f"{i}.removed"], tensors[f"{i}.error"]) for i in range(len(structure.sublayers))]
        plan = Plan(
            structure, sample, Surgeon(**header["method"]), orders, int(header["seed"]), list(header["lengths"]),
            dict(header["seconds"]), list(header["warnings"]),
        )  # fmt: skip
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not a plan that shearling saved: {error}") from None
    if header.get("fingerprint") != sample.fingerprint:
        plan.warnings.append("the plan was measured on another sample than the one given for the refit")
    return plan
