"""The self-check before anything is saved: is the small model the one that was meant?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.costs import Limit
from shearling.engine.hooks import device_of, frozen, masked, run
from shearling.errors import CheckFailed
from shearling.models.shrink import columns_of
from shearling.models.structure import Structure
from shearling.sample.sample import Sample

EXAMPLES = 8
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}


def self_check(
    teacher: Structure, student: Structure, kept: Sequence[Tensor], sample: Sample, limits: Sequence[Limit]
) -> float:
    """The largest relative difference between the shrunk and the masked model; raises `CheckFailed`."""
    for name, parameter in student.model.named_parameters():
        if not parameter.isfinite().all():
            raise CheckFailed(f"'{name}' of the pruned model holds values that are not finite. Nothing was saved.")
    counts = [s.units for s in student.sublayers]
    for limit in limits:
        if not limit.holds(counts):
            raise CheckFailed(
                f"The pruned model costs {limit.spent(counts):.6g} {limit.name}, its budget is {limit.budget:.6g}. "
                "Nothing was saved; please report this with the command you ran."
            )
    return _compare(teacher, student, kept, sample)


def check_cut(teacher: Structure, student: Structure, kept: Sequence[Tensor], sample: Sample) -> float:
    """Right after the cut, before any repair: the small model must put out what the dense one does under its masks."""
    batch = sample.batches[0].part(0, EXAMPLES)
    masks = {
        s: torch.zeros(s.units).index_fill(0, units.cpu(), 1)
        for s, units in zip(teacher.sublayers, kept, strict=True)
        if s.units  # none were left by an earlier pruning: there is nothing to mask
    }
    with frozen(teacher.model), frozen(student.model), torch.inference_mode():
        small = _values(run(student.model, batch.to(device_of(student.model))))
        with masked(list(masks), list(masks.values())):
            full = _values(run(teacher.model, batch.to(device_of(teacher.model))))
    return _difference(small, full, student.model.dtype)


def _compare(teacher: Structure, student: Structure, kept: Sequence[Tensor], sample: Sample) -> float:
    batch = sample.batches[0].part(0, EXAMPLES)
    with frozen(teacher.model), frozen(student.model), torch.inference_mode():
        here = batch.to(device_of(student.model))
        small = _values(run(student.model, here))
        with ExitStack() as hooks:
            for dense, sublayer, units in zip(teacher.sublayers, student.sublayers, kept, strict=True):
                hook = _standing_in(sublayer.weight, sublayer.bias, columns_of(units, dense.width))
                hooks.callback(dense.out.register_forward_hook(hook).remove)
                for before, after in zip(dense.inputs, sublayer.inputs, strict=len(units) > 0):
                    rows = columns_of(units, before.rows, blocks=before.blocks, units=dense.units)
                    hooks.callback(before.module.register_forward_hook(_feeding(after.module, rows)).remove)
            full = _values(run(teacher.model, batch.to(device_of(teacher.model))))
    return _difference(small, full, student.model.dtype)


def _difference(small: dict[str, Tensor], full: dict[str, Tensor], dtype: torch.dtype) -> float:
    """The largest, relative to the largest value; raises where it is more than the dtype explains."""
    worst = 0.0
    for name, value in small.items():
        scale = full[name].float().abs().max().clamp_min(1e-6)
        difference = (value.float() - full[name].float().to(value.device)).abs().max() / scale.to(value.device)
        worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
    if not worst <= TOLERANCE.get(dtype, 1e-3):
        raise CheckFailed(
            f"The shrunk model's outputs differ from the masked model's by {worst:.3g} (relative). Nothing was saved; "
            "please report this with the model's config.json."
        )
    return worst


def _standing_in(weight: Tensor, bias: Tensor | None, columns: Tensor) -> Any:
    """A hook that gives the dense projection the pruned one's weights, on the kept columns only."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        h = args[0].index_select(-1, columns.to(args[0].device))
        return F.linear(h, weight.to(h.device), None if bias is None else bias.to(h.device))

    return hook


def _feeding(small: nn.Module, rows: Tensor) -> Any:
    """A hook that gives the kept rows of a projection into the units the pruned one's values."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.index_copy(-1, rows.to(output.device), small(args[0])) if len(rows) else output

    return hook


def _values(outputs: Any) -> dict[str, Tensor]:
    names = ("logits", "start_logits", "end_logits", "last_hidden_state", "text_embeds", "image_embeds")
    return {name: outputs[name] for name in names if isinstance(outputs.get(name), Tensor)}
