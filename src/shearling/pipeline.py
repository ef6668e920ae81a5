"""The pipeline: model + sample + constraint -> evidence -> what stays -> shrink -> repair -> check -> result."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shearling.checkpoint.plan import read_plan, write_plan
from shearling.checkpoint.save import save
from shearling.costs import (
    Limit,
    count_macs,
    count_params,
    flops_limit,
    parameters,
    params_limit,
    ratio_of,
    sequence_lengths,
    whole_macs,
)
from shearling.engine.distributed import fail_together, rank_and_world
from shearling.engine.hooks import device_of
from shearling.engine.memory import bounded, with_halving
from shearling.engine.progress import Stages, Watcher
from shearling.errors import CheckpointError, ConstraintError, DataError, InputError, ModelError
from shearling.latency.meet import checked_table, meet, table_for
from shearling.methods import Evidence, Method, Repaired, asked, configured, method_of, settings_of
from shearling.models.offloaded import with_all_weights
from shearling.models.positions import positions_of
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.report.record import Cost, Report
from shearling.sample.sample import Sample, accepted_inputs, sample_of
from shearling.verify import check_cut, self_check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.latency.table import Table

SAMPLES = 2048
FEW = 64
MOST_TOKENS = 2**20  # of an example; one of them is run to count FLOPs
NO_CONSTRAINT = "Give a constraint: flops=0.5, params=0.5 or latency=0.5 (several may be given together)."


@dataclass(frozen=True)
class Pruned:
    """The result: a smaller model, what stayed in it, and the record of how it came about."""

    model: PreTrainedModel
    kept: list[Tensor]
    report: Report

    def save(self, directory: str | os.PathLike[str], *, source: Any = None, force: bool = False) -> Path:
        """Write a checkpoint that loads with plain `from_pretrained`; `source` is where tokenizer files come from."""
        return save(self.model, self.kept, self.report.to_json(), directory, source=source, force=force)

    def __str__(self) -> str:
        return str(self.report)


@dataclass(frozen=True)
class Plan:
    """One measurement of a model; `prune` may be called for as many constraints as you like."""

    structure: Structure
    sample: Sample
    method: Method
    evidence: Evidence
    seed: int
    lengths: list[float]
    seconds: Mapping[str, float]
    warnings: list[str] = field(default_factory=list)
    watcher: Watcher | None = None
    batch_size: int = 32  # of the batches as they were given

    @fail_together()
    def prune(
        self,
        *,
        flops: float | None = None,
        params: float | None = None,
        latency: float | None = None,
        table: Table | str | os.PathLike[str] | None = None,
        correct: bool = True,
        multiple_of: int | None = None,
        check: bool = True,
    ) -> Pruned:
        """A smaller copy of the model within every constraint given.

        latency, table  of the whole forward pass, by a latency table; without one, the model is profiled here and now
        correct         where the model turns out slower than the table says, correct the table and choose again
        multiple_of     round filter counts; 1 unless given, 8 for `surgeon` under a latency (what the tables hold)
        """
        stages = Stages(self.watcher)
        teacher = self.structure
        limits = limits_of(teacher, self.lengths, flops=flops, params=params, latency=latency)
        extra: dict[str, Any] = {}
        warnings: list[str] = []
        if latency is None:
            kept, student = self._cut(limits, checked_multiple(1 if multiple_of is None else multiple_of), stages)
        else:
            met = meet(
                ratio_of("latency", latency),
                table_for(teacher, self.batch_size, self.sample.mean_length, table, stages),
                teacher,
                lambda more: self._cut([*limits, *more], self._aligned(multiple_of), stages),
                correct=correct,
                stages=stages,
            )
            kept, student, warnings = met.kept, met.student, met.warnings
            limits, extra = [*limits, *met.limits], {"latency": met.record}
        if check:
            with stages("check"):
                check_cut(teacher, student, kept, self.sample)
        student, repairs = self._repair(student, kept, stages)
        difference = None
        if check:
            with stages("check"):
                difference = self_check(teacher, student, kept, self.sample, limits)
        report = self._report(student, limits, stages, repairs, difference)
        return Pruned(student.model, kept, replace(report, extra=extra, warnings=[*report.warnings, *warnings]))

    def _cut(self, limits: Sequence[Limit], multiple_of: int, stages: Stages) -> tuple[list[Tensor], Structure]:
        """Choose what stays, and make the student."""
        kept = self.method.choose(self.evidence, self.structure, limits, multiple_of=multiple_of, stages=stages)
        if not any(len(units) for units in kept):
            raise ConstraintError(f"{asked(limits)} leaves not a single unit in any layer; ask for more.")
        with stages("shrink"):
            return kept, structure_of(shrink(self.structure.model, kept))

    def _aligned(self, multiple_of: int | None) -> int:
        """Under a latency, filters in the steps that were timed; Alg. 2 knows no steps."""
        if multiple_of is not None:
            return checked_multiple(multiple_of)
        return self.method.filter_step

    def _repair(self, student: Structure, kept: list[Tensor], stages: Stages) -> tuple[Structure, list[Repaired]]:
        """Repair the student; a try that ran out of memory half-way starts over from a fresh cut."""
        students = itertools.chain([student], map(structure_of, iter(lambda: shrink(self.structure.model, kept), None)))

        def attempt(sample: Sample) -> tuple[Structure, list[Repaired]]:
            current = next(students)
            return current, self.method.repair(self.structure, current, sample, stages=stages)

        rank, world = rank_and_world()
        return with_halving(attempt, self.sample.shard(rank, world), alone=world == 1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Keep the measurement (not the model or the sample) for another session."""
        header = {
            "sizes": self.structure.sizes,
            "lengths": self.lengths,
            "seed": self.seed,
            "seconds": dict(self.seconds),
            "fingerprint": self.sample.fingerprint,
            "warnings": self.warnings,
            "examples": self.sample.examples,
            "method": self.method.name,
            "settings": settings_of(self.method),
        }
        return write_plan(Path(path), header, self.method.pack(self.evidence))

    def _whole_macs(self, student: Structure, length: float) -> tuple[float, float]:
        """The whole model before and after; where all layers see the same tokens, running the dense one tells both."""
        whole = whole_macs(self.structure.model, self.sample, length)
        if len(set(self.lengths)) > 1:
            return whole, whole_macs(student.model, self.sample, length)
        tokens = [float(round(length))] * len(self.lengths)  # what was run; the layers are counted at the mean itself
        rest = whole - count_macs(self.structure, tokens)
        return rest + count_macs(self.structure, self.lengths), rest + count_macs(student, self.lengths)

    def _report(
        self,
        student: Structure,
        limits: Sequence[Limit],
        stages: Stages,
        repairs: list[Repaired],
        difference: float | None,
    ) -> Report:
        dense = self.structure
        length = sum(self.lengths) / len(self.lengths)
        macs = self._whole_macs(student, length)
        return Report(
            method=self.method.name,
            settings=settings_of(self.method),
            constraint={limit.name: limit.ratio for limit in limits},
            flops=Cost(count_macs(dense, self.lengths), count_macs(student, self.lengths)),
            params=Cost(count_params(dense), count_params(student)),
            flops_model=Cost(*macs),
            params_model=Cost(parameters(dense.model), parameters(student.model)),
            layers=student.sizes,
            dense_layers=dense.sizes,
            seconds={**self.seconds, **stages.seconds},
            seed=self.seed,
            examples=self.sample.examples,
            mean_length=length,
            fingerprint=self.sample.fingerprint,
            model_type=dense.model.config.model_type,
            repairs=repairs,
            check=difference,
            warnings=self.warnings,
        )


@fail_together()
def measure(
    model: PreTrainedModel,
    data: Any,
    *,
    method: str | Method = "surgeon",
    samples: int = SAMPLES,
    seed: int = 0,
    length: float | None = None,
    watcher: Watcher | None = None,
) -> Plan:
    """Look at the model once, over a sample of its data; the plan then prunes to any constraint.

    data     a tokenised `datasets.Dataset`, of whose rows `samples` are drawn by the seed; or a re-iterable of batches,
             dicts of tensors as a DataLoader gives them, of which the first are taken
    length   tokens of an example, for counting FLOPs; the mean of the sample's, without padding, unless given
    watcher  called with (stage, done, total) as the work goes on
    """
    structure = prunable(model)
    model = structure.model
    chosen = method_of(method)
    longest = positions_of(model.config) or MOST_TOKENS
    if length is not None and not 1 <= length <= longest:
        raise InputError(f"A length of {length} tokens makes no sense for this model; give 1 to {longest}.")
    device = device_of(model)
    given = sample_of(data, limit=samples, accepts=accepted_inputs(model), seed=seed)
    sample = bounded(given, device, backward=False)
    _check_tokens(model, sample)
    stages = Stages(watcher)
    lengths = sequence_lengths(structure, sample) if length is None else [length] * len(structure.sublayers)
    rank, world = rank_and_world()
    if sample.examples < world:
        raise DataError(f"The sample has {sample.examples} examples for {world} processes; every one needs some.")
    shard = bounded(sample.shard(rank, world), device)
    evidence = chosen.measure(structure, shard, seed=seed, stages=stages)
    warnings = []
    if sample.examples < FEW:
        warnings.append(
            f"the sample has only {sample.examples} examples; 2,048 are good, below {FEW} results vary a lot"
        )
    seconds = dict(stages.seconds)
    return Plan(structure, sample, chosen, evidence, seed, lengths, seconds, warnings, watcher, given.largest)


@fail_together()
def prune(
    model: PreTrainedModel,
    data: Any,
    *,
    flops: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    table: Table | str | os.PathLike[str] | None = None,
    correct: bool = True,
    method: str | Method = "surgeon",
    multiple_of: int | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    length: float | None = None,
    watcher: Watcher | None = None,
) -> Pruned:
    """Prune once. The model is left untouched; the result holds a smaller copy.

    >>> pruned = shearling.prune(model, batches, flops=0.5)  # doctest: +SKIP
    """
    given = {name: v for name, v in {"flops": flops, "params": params, "latency": latency}.items() if v is not None}
    for name, value in given.items():
        ratio_of(name, value)  # fail before the work, not after
    if not given:
        raise ConstraintError(NO_CONSTRAINT)
    table = checked_table(table, latency, model)
    plan = measure(model, data, method=method, samples=samples, seed=seed, length=length, watcher=watcher)
    return plan.prune(
        flops=flops, params=params, latency=latency, table=table, correct=correct, multiple_of=multiple_of
    )


def load_plan(path: str | os.PathLike[str], model: PreTrainedModel, data: Any, *, samples: int | None = None) -> Plan:
    """A saved measurement with the model and the sample it was made of (the refit needs both again)."""
    structure = prunable(model)
    header, tensors = read_plan(Path(path))
    if header["sizes"] != structure.sizes:
        raise CheckpointError(f"{path} was measured on another model: it has {header['sizes']} units per layer.")
    try:
        method = configured(header["method"], **header["settings"])
        evidence = method.unpack(tensors, structure)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a plan that shearling saved: {error}") from None
    limit = header["examples"] if samples is None else samples
    given = sample_of(data, limit=limit, accepts=accepted_inputs(model), seed=header["seed"])
    sample = bounded(given, device_of(structure.model), backward=False)
    warnings = list(header["warnings"])
    if header["fingerprint"] != sample.fingerprint:
        warnings.append("the plan was measured on another sample than the one given for the refit")
    return Plan(
        structure, sample, method, evidence, header["seed"], header["lengths"], dict(header["seconds"]), warnings,
        batch_size=given.largest,
    )  # fmt: skip


def limits_of(
    structure: Structure,
    lengths: Sequence[float],
    *,
    flops: float | None = None,
    params: float | None = None,
    latency: float | None = None,
) -> list[Limit]:
    """The constraints as tables of costs; a latency's own come from its table."""
    limits = []
    if flops is not None:
        limits.append(flops_limit(structure, lengths, ratio_of("flops", flops)))
    if params is not None:
        limits.append(params_limit(structure, ratio_of("params", params)))
    if not limits and latency is None:
        raise ConstraintError(NO_CONSTRAINT)
    return limits


def checked_multiple(multiple_of: int) -> int:
    """A multiple that makes sense."""
    if multiple_of < 1:
        raise InputError(f"multiple_of={multiple_of} makes no sense; 8 suits most GPUs, 1 means no rounding.")
    return multiple_of


def _check_tokens(model: PreTrainedModel, sample: Sample) -> None:
    """Tokens that the model has no embedding for: torch would only say that an index is out of range."""
    if not any("input_ids" in batch.inputs for batch in sample):
        return
    try:
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # a model of two towers need not say
        known = None
    if known is None:
        return
    largest = max(int(batch.inputs["input_ids"].max()) for batch in sample if batch.inputs["input_ids"].numel())
    if largest >= known:
        raise DataError(
            f"The sample holds the token {largest}, but the model's vocabulary has {known} (0 to {known - 1}); "
            "use the tokenizer that belongs to the model."
        )


def prunable(model: PreTrainedModel) -> Structure:
    """The model's structure, once it is clear that the model can be pruned."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ModelError(f"Expected a transformers model, got {type(model).__name__}.")
    if getattr(model, "is_quantized", False):
        raise ModelError("The model is quantised; prune first and quantise the result.")
    model = with_all_weights(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"'{name}' has no values (meta device); load the model's weights first.")
        if parameter.device.type not in ("cpu", "cuda"):
            raise ModelError(f"'{name}' is on {parameter.device.type}, which lacks float64; move the model to the cpu.")
        if not torch.isfinite(parameter).all():
            raise ModelError(f"'{name}' holds NaN or infinite values; the checkpoint is damaged or overflowed.")
    structure = structure_of(model)
    if not any(s.units for s in structure.sublayers):
        raise ModelError("There is no unit left to prune in any layer of this model.")
    return structure
