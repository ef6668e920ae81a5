"""A measurement on disk: the orders and curves of method `surgeon`, in safetensors with a JSON header."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from shearling.distributed import on_first
from shearling.errors import CheckpointError, InputError
from shearling.files import write_whole
from shearling.methods import Surgeon
from shearling.models.structure import Structure
from shearling.passes import bounded, device_of
from shearling.pipeline import Plan, prunable
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
        "examples": plan.sample.examples,
        "method": asdict(plan.method),
    }
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    on_first(lambda: write_whole(path, save(contiguous, metadata={"shearling": json.dumps(header)})))
    return path


def load_plan(path: str | os.PathLike[str], model: PreTrainedModel, data: Any, *, samples: int | None = None) -> Plan:
    """A saved measurement with the model and the sample it was made of (the refit needs both again)."""
    structure = prunable(model)
    header, orders = _read(Path(path), structure)
    limit = header["examples"] if samples is None else samples
    given = sample_of(data, limit=limit, accepts=accepted_inputs(model), seed=header["seed"])
    sample = bounded(given, device_of(structure.model), backward=False)
    warnings = list(header["warnings"])
    if header["fingerprint"] != sample.fingerprint:
        warnings.append("the plan was measured on another sample than the one given for the refit")
    try:
        method = Surgeon(**header["method"])
        lengths, seconds = [float(n) for n in header["lengths"]], dict(header["seconds"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a plan that shearling saved: {error}") from None
    return Plan(
        structure, sample, method, orders, header["seed"], lengths, seconds, warnings, batch_size=given.largest
    )  # fmt: skip


def _read(path: Path, structure: Structure) -> tuple[dict[str, Any], list[Order]]:
    """The header and the orders, once they are seen to belong to the model."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["shearling"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if header["sizes"] != structure.sizes:
            raise CheckpointError(f"{path} was measured on another model: it has {header['sizes']} units per layer.")
        missing = {"lengths", "seed", "seconds", "fingerprint", "warnings", "examples", "method"} - header.keys()
        if missing:
            raise KeyError(f"{sorted(missing)} missing")
        header["seed"] = int(header["seed"])
        orders = [Order(tensors[f"{i}.removed"], tensors[f"{i}.error"]) for i in range(len(structure.sublayers))]
    except CheckpointError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a plan that shearling saved: {error}") from None
    for order, sublayer in zip(orders, structure.sublayers, strict=True):
        whole = sorted(order.removed.tolist()) == list(range(sublayer.units)) and len(order.error) == sublayer.units + 1
        if not whole or not order.error.isfinite().all():
            raise CheckpointError(f"{path}: the order of the {sublayer.name} is damaged; measure again.")
    return header, orders
