"""Checks of the model and sample before a run, and of the pruned model after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.costs import Limit
from shearling.engine.hooks import device_of, frozen, masked, run
from shearling.engine.memory import LOGITS, logits_per_token
from shearling.engine.precision import kernels
from shearling.errors import CheckFailed, DataError, ModelError
from shearling.models.offloaded import with_all_weights
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import columns_of
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXAMPLES = 8  # for comparing outputs
PART = 2**22  # numbers that are compared at once
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}


def prunable(model: PreTrainedModel) -> Structure:
    """Check that the model can be pruned, and return its structure."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ModelError(f"Expected a transformers model, got {type(model).__name__}.")
    if getattr(model, "is_quantized", False):
        raise ModelError("The model is quantised; prune first and quantise the result.")
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError("The model carries adapters; merge them first: model = peft_model.merge_and_unload().")
    model = with_all_weights(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"'{name}' has no values (meta device); load the model's weights first.")
        if parameter.device.type not in ("cpu", "cuda"):
            raise ModelError(f"'{name}' is on {parameter.device.type}, which lacks float64; move the model to the cpu.")
    if name := _not_finite(model):
        raise ModelError(f"'{name}' holds NaN or infinite values; the checkpoint is damaged or overflowed.")
    structure = structure_of(model)
    if not any(s.units for s in structure.sublayers):
        raise ModelError("There is no unit left to prune in any layer of this model.")
    return structure


def check_tokens(model: PreTrainedModel, sample: Sample) -> None:
    """Raise for tokens outside the vocabulary, which torch reports only as an index out of range."""
    if "input_ids" not in sample.inputs:
        return
    try:
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # some two-tower models
        known = None
    largest = sample.largest_value("input_ids")
    if known is not None and largest >= known:
        raise DataError(
            f"The sample has the token {largest}, but the model's vocabulary has {known} (0 to {known - 1}); "
            "use the tokenizer that belongs to the model."
        )


def self_check(
    teacher: Structure, student: Structure, kept: Sequence[Tensor], sample: Sample, limits: Sequence[Limit]
) -> float:
    """Largest relative difference between the shrunk and the masked model; raises `CheckFailed` if too large."""
    check_finite(student.model)
    counts = [s.units for s in student.sublayers]
    for limit in limits:
        if not limit.holds(counts):
            raise CheckFailed(
                f"The pruned model costs {limit.spent(counts):.6g} {limit.name}, its budget is {limit.budget:.6g}. "
                "Nothing was saved; please report this with the command you ran."
            )
    return _difference(teacher, student, sample, _repaired(teacher, student, kept))


def check_finite(model: nn.Module) -> None:
    """Raise if a weight is not finite."""
    if name := _not_finite(model):
        raise CheckFailed(f"'{name}' of the pruned model holds values that are not finite. Nothing was saved.")


def _not_finite(model: nn.Module) -> str:
    """Name of the first parameter that is not finite, or ""."""
    # All checks are launched before the first is read, to synchronise with a GPU only once. The extremes of values with
    # NaN are NaN, and take no copy of a large table.
    found = [(name, p.aminmax()) for name, p in model.named_parameters() if p.numel()]
    return next((name for name, (least, most) in found if not (least.isfinite() and most.isfinite())), "")


def check_cut(teacher: Structure, student: Structure, kept: Sequence[Tensor], sample: Sample) -> float:
    """Check that the shrunk model, before any repair, gives the same outputs as the masked dense model."""
    masks = {
        s: torch.zeros(s.units).index_fill(0, units.cpu(), 1)
        for s, units in zip(teacher.sublayers, kept, strict=True)
        if s.units  # else removed by an earlier pruning
    }
    return _difference(teacher, student, sample, masked(list(masks), list(masks.values())))


@contextmanager
def _repaired(teacher: Structure, student: Structure, kept: Sequence[Tensor]) -> Iterator[None]:
    """Hooks that make the dense model compute with masks and the repaired weights of the pruned one."""
    with ExitStack() as hooks:
        for dense, sublayer, units in zip(teacher.sublayers, student.sublayers, kept, strict=True):
            hook = _standing_in(sublayer.weight, sublayer.bias, columns_of(units, dense.width))
            hooks.callback(dense.out.register_forward_hook(hook).remove)
            for before, after in zip(dense.inputs, sublayer.inputs, strict=len(units) > 0):
                rows = before.rows_of(units, dense.units)
                hooks.callback(before.module.register_forward_hook(_feeding(after.module, rows)).remove)
        yield


def _some(structure: Structure, sample: Sample) -> Batch:
    """A few examples; fewer, but at least one, if the logits of a language model are large."""
    batch = sample.some(EXAMPLES)
    width = logits_per_token(structure.model)
    tokens = max(t.shape[1] for t in batch.inputs.values() if t.dim() > 1) if width else 0
    return batch if not tokens else sample.some(max(1, min(EXAMPLES, LOGITS["cpu"] // (width * tokens))))


def _difference(teacher: Structure, student: Structure, sample: Sample, masks: AbstractContextManager[None]) -> float:
    """Largest difference relative to the largest value; raises if it exceeds the dtype's tolerance."""
    batch = _some(teacher, sample)
    with frozen(teacher.model), frozen(student.model), torch.no_grad(), kernels(student.model, "float32"):
        small = _values(run(student.model, batch.to(device_of(student.model))))
        with masks:
            full = _values(run(teacher.model, batch.to(device_of(teacher.model))))
    worst = 0.0
    for name, value in small.items():
        least, most = full[name].aminmax()  # without a copy
        scale = torch.maximum(-least, most).float().clamp_min(1e-6)
        pairs = zip(*(t.to(value.device).flatten().split(PART) for t in (value, full[name])), strict=True)
        for one, other in pairs:
            difference = (one.float() - other.float()).abs().max() / scale.to(value.device)
            worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
    if not worst <= TOLERANCE.get(student.model.dtype, 1e-3):
        raise CheckFailed(
            f"The shrunk model's outputs differ from the masked model's by {worst:.3g} (relative). Nothing was saved; "
            "please report this with the model's config.json."
        )
    return worst


def _standing_in(weight: Tensor, bias: Tensor | None, columns: Tensor) -> Any:
    """A hook that replaces a dense output by the pruned projection's, applied to the kept columns."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        h = args[0].index_select(-1, columns.to(args[0].device))
        return F.linear(h, weight.to(h.device), None if bias is None else bias.to(h.device))

    return hook


def _feeding(small: nn.Module, rows: Tensor) -> Any:
    """A hook that replaces the kept rows of an input projection's output by the pruned one's."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.index_copy(-1, rows.to(output.device), small(args[0])) if len(rows) else output

    return hook


def _values(outputs: Any) -> dict[str, Tensor]:
    """The main floating-point outputs of a model by name, or all of them if none of the known names is present."""
    numbers = {k: v for k, v in outputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    names = ("logits", "start_logits", "end_logits", "last_hidden_state", "text_embeds", "image_embeds")
    found = {name: numbers[name] for name in names if name in numbers} or numbers
    if not found:
        raise CheckFailed(
            f"The model returns {list(outputs)}, but no floating-point tensor to compare. Nothing was saved."
        )
    return found
