"""The pipeline: model + sample + constraint -> evidence -> kept units -> shrink -> repair -> verify -> result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shearling.checkpoint.plan import read_plan, write_plan
from shearling.checkpoint.pruned import Pruned as Pruned
from shearling.costs import Counted, Limit, count_params, parameters, sequence_lengths
from shearling.engine.agreement import Agreement, Answers, agreement, answers, held_out
from shearling.engine.decoder import with_targets
from shearling.engine.distributed import fail_together, on_first, rank_and_world
from shearling.engine.hooks import device_of, eager
from shearling.engine.memory import batches_that_fit, give_back
from shearling.engine.polish import Polished, polish
from shearling.engine.precision import used_precision
from shearling.engine.progress import Stages, Watcher
from shearling.engine.teacher_states import TeacherStates
from shearling.engine.warm_up import warm_up
from shearling.errors import CheckpointError, ConstraintError, DataError, InputError
from shearling.estimate import Estimate, estimate
from shearling.latency.meet import Selection, meet, table_for
from shearling.methods import Evidence, Method, Repaired, asked, configured, method_of, settings_of
from shearling.methods.layers import LayerOrder
from shearling.methods.ranges import MOST_TOKENS, Samples, Shape, checked_samples, checked_seed
from shearling.methods.stock import Choice, StockShape, choose_stock, uneven_loss
from shearling.models.digest import weights_digest_of
from shearling.models.positions import positions_of
from shearling.models.shrink import Cut
from shearling.models.structure import Structure
from shearling.report.facts import count
from shearling.report.record import Cost, Report
from shearling.sample.read import accepted_by, sample_of
from shearling.sample.sample import Sample
from shearling.target import TableLike, Target
from shearling.verify import check_cut, check_finite, check_tokens, prunable, self_check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEW = 64
WIDE = 256  # filters of an FFN above which rounding their number costs nothing


@dataclass(frozen=True)
class Plan:
    """The measurement of one model; `prune` may be called for any number of constraints.

    lengths   per sublayer, tokens per example for counting FLOPs
    watcher   sees the progress of `meet`, unless that is given another
    shown     opens a watcher for a call of `prune`
    why       reason for the size of the sample
    states    cache of the teacher's tensors between budgets; None if only one is to come
    expected  the estimate of memory and time
    """

    structure: Structure
    sample: Sample
    method: Method
    evidence: Evidence
    seed: int
    lengths: list[float]
    seconds: Mapping[str, float]
    warnings: list[str] = field(default_factory=list)
    watcher: Watcher | None = None
    shown: Callable[[], AbstractContextManager[Watcher]] | None = None
    why: str = ""
    states: TeacherStates | None = None
    expected: Estimate | None = None

    def prune(
        self,
        *,
        flops: float | None = None,
        params: float | None = None,
        latency: float | None = None,
        table: TableLike = None,
        batch_size: int | None = None,
        seq_len: int | None = None,
        correct: bool = True,
        multiple_of: int | None = None,
        shape: Shape = "uneven",
    ) -> Pruned:
        """Returns a smaller copy of the model that meets every given constraint.

        latency, table       of the whole forward pass, by a latency table; without one, the model is profiled first,
        batch_size, seq_len  at this shape (default: one example of the sample's mean length)
        correct              if the model is slower than the table predicts, correct the table and choose again
        multiple_of          step of filter counts; default: the method's (surgeon: 8 in wide FFNs)
        shape                uneven, or stock: one width, one number of heads, maybe fewer layers; loads anywhere
        """
        target = Target(flops, params, multiple_of, latency, table, correct, batch_size, seq_len, shape).checked()
        target.check_fits(self.structure, self.method)
        with self.shown() if self.shown else nullcontext() as watcher:
            return self.meet(target, watcher)

    @eager()
    @fail_together()
    def meet(self, target: Target, watcher: Watcher | None = None) -> Pruned:
        """Returns a smaller copy of the model that meets a validated target."""
        stages, dense = Stages(watcher or self.watcher), self.structure
        limits = target.limits(dense, self.lengths)
        if target.latency is None:
            step = target.multiple_of or self._step
            chosen = Selection(*self._cut(limits, step, target.shape, stages))
        else:
            step = target.multiple_of or self.method.filter_step
            chosen = meet(
                target.latency,
                target.times or table_for(dense, target.batch_size or 1, target.seq_len or self._length, stages),
                dense,
                lambda more: self._cut([*limits, *more], step, target.shape, stages),
                correct=target.correct,
                stages=stages,
            )
        give_back(device_of(dense.model))
        limits, cut, student = [*limits, *chosen.limits], chosen.choice.cut, chosen.student
        stock = self._with_uneven_loss(chosen.choice.stock, limits, step, stages)
        teacher, units = cut.teacher(dense), cut.units_of(student, dense)
        with stages("check"):
            check_cut(teacher, student, units, self.sample)
        mine, device = self.sample.shard(*rank_and_world()), device_of(dense.model)
        attempts = batches_that_fit(mine, device, backward=False, precision=self.method.precision, sums=True)
        for number, attempt in enumerate(attempts):
            with attempt as batches:
                if number:  # memory ran out half-way through the repair: start again with a fresh student
                    student = cut.student(dense)
                repairs = self.method.repair(dense, student, batches, stages=stages, states=self.states)
        give_back(device)
        with stages("check"):
            here = [limit.among(student.places_in(dense)) for limit in limits]
            difference = self_check(teacher, student, units, self.sample, here)
        polished = self._polish(student, cut.kept, stages)
        give_back(device)
        with stages("agreement"):
            alike = on_first(lambda: self._agreement(student))
        report = replace(
            self._report(student, limits, repairs),
            check=difference,
            shape=target.shape,
            stock=None if stock is None else asdict(stock),
            latency=None if chosen.latency is None else asdict(chosen.latency),
            agreement=None if alike is None else asdict(alike),
            polish=None if polished is None else polished.to_json(),
            seconds={**self.seconds, **stages.seconds},
            warnings=[
                *self.sample.notes,
                *self.warnings,
                *self.method.concerns(repairs),
                *chosen.warnings,
                *(alike.warnings if alike else ()),
            ],
        )
        return Pruned(student.model, cut.kept, report)

    @cached_property
    def _held_out(self) -> tuple[Sample, Answers] | None:
        """The held-out examples and the dense model's decisions on them."""
        sample = held_out(self.sample)
        return None if sample is None else (sample, answers(self.structure.model, sample))

    def _agreement(self, student: Structure) -> Agreement | None:
        """Agreement of the two models on held-out examples; None if there are none."""
        if self._held_out is None:
            return None
        sample, dense = self._held_out
        return agreement(dense, answers(student.model, sample))

    @property
    def _length(self) -> float | None:
        """Mean number of tokens per example, where all layers see the same; else of the inputs."""
        return self.sample.mean_length or (self.lengths[0] if len(set(self.lengths)) == 1 else None)

    @property
    def _step(self) -> int:
        """Default step of filter counts; 1 for narrow FFNs."""
        widths = [s.units for s in self.structure.sublayers if s.kind == "filters"]
        return self.method.filter_step if min(widths, default=0) >= WIDE else 1

    @cached_property
    def _layer_order(self) -> LayerOrder:
        """The order of removing whole layers, for stock shapes."""
        return LayerOrder(self.structure, self.sample, self.method)

    def _cut(self, limits: Sequence[Limit], multiple_of: int, shape: Shape, stages: Stages) -> tuple[Choice, Structure]:
        """Choose the units to keep, and build the student."""
        given = (self.evidence, self.structure, limits)
        how: dict[str, Any] = {"multiple_of": multiple_of, "stages": stages}
        if shape == "stock":
            chosen = choose_stock(self.method, *given, self.lengths, order=self._layer_order, **how)
        else:
            kept = self.method.choose(*given, **how)
            if not any(len(units) for units in kept):
                raise ConstraintError(f"{asked(limits)} leaves not a single unit in any layer; ask for more.")
            kept = self.method.settled(self.evidence, self.structure, kept, self.sample, stages=stages)
            chosen = Choice(Cut(kept))
        with stages("shrink"):
            return chosen, chosen.cut.student(self.structure)

    def _with_uneven_loss(
        self, stock: StockShape | None, limits: Sequence[Limit], multiple_of: int, stages: Stages
    ) -> StockShape | None:
        """Add the loss of uneven shapes at the same budget."""
        if stock is None:
            return None
        given = (self.method, self.evidence, self.structure, limits)
        with stages("layers"):
            uneven = uneven_loss(*given, order=self._layer_order, multiple_of=multiple_of)
        return replace(stock, uneven_loss=uneven)

    def _polish(self, student: Structure, kept: list[Tensor], stages: Stages) -> Polished | None:
        """Distil the student from the dense model, if the method asks for it."""
        if self.method.polish == "off":
            return None
        share = self._counted.layers_of(student) / self._counted.layers
        with stages("polish") as progress:
            found = polish(
                self.structure,
                student,
                self.sample,
                self.method.polish,
                share=share,
                expected_loss=self.method.expected_loss(self.evidence, self.structure, kept, self.lengths),
                precision=self.method.precision,
                seed=self.seed,
                progress=progress,
            )
        check_finite(student.model)
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the measurement (not the model or the sample) for another session."""
        header = {
            "sizes": self.structure.sizes,
            "weights": weights_digest_of(self.structure.model),
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

    @cached_property
    def _counted(self) -> Counted:
        """The dense model's multiply-accumulates."""
        return Counted.of(self.structure, self.sample, self.lengths)

    def _report(self, student: Structure, limits: Sequence[Limit], repairs: list[Repaired]) -> Report:
        """The record of settings, sizes and costs."""
        dense, settings = self.structure, settings_of(self.method)
        if "precision" in settings:  # the one that was used, which depends on the device
            settings["precision"] = used_precision(dense.model, self.method.precision)
        return Report(
            method=self.method.name,
            settings=settings,
            constraint={limit.name: limit.ratio for limit in limits},
            flops=Cost(self._counted.layers, self._counted.layers_of(student)),
            params=Cost(count_params(dense), count_params(student)),
            flops_model=Cost(self._counted.whole, self._counted.whole_of(student)),
            params_model=Cost(parameters(dense.model), parameters(student.model)),
            layers=student.sizes_in(dense),
            dense_layers=dense.sizes,
            seed=self.seed,
            examples=self.sample.examples,
            samples={"used": self.sample.examples, "given": self.sample.given, "why": self.why},
            mean_length=sum(self.lengths) / len(self.lengths),
            fingerprint=self.sample.fingerprint,
            model_type=dense.model.config.model_type,
            repairs=repairs,
            estimate=None if self.expected is None else asdict(self.expected),
        )


@eager()
@fail_together()
def measure(
    model: PreTrainedModel,
    data: Any,
    *,
    method: str | Method = "surgeon",
    samples: Samples = "auto",
    seed: int = 0,
    length: float | None = None,
    watcher: Watcher | None = None,
    notes: Sequence[str] = (),
    target: Target | None = None,
) -> Plan:
    """Measure a model once over a sample of its data; the plan then prunes to any constraint.

    data     a DataLoader, any iterable of batches (dicts of tensors of any batch size), or a tokenised
             `datasets.Dataset`
    samples  number of examples to draw by the seed; "auto" takes up to 2,048 (embedding models on a GPU: 8,192)
    length   tokens per example for counting FLOPs; default: the sample's mean without padding
    watcher  progress callback: (stage, done, total)
    notes    warnings for the report about the model and its data
    target   the only target to come, validated: on a CPU fewer examples may then suffice, and nothing is cached
    """
    structure, method, stages = prunable(model), method_of(method), Stages(watcher)
    model, device = structure.model, device_of(structure.model)
    if target is not None:
        target.check_fits(structure, method)
    longest = positions_of(model.config) or MOST_TOKENS
    if length is not None and not 1 <= length <= longest:
        raise InputError(f"A length of {length} tokens makes no sense for this model; give 1 to {longest}.")
    warm_up(device)
    limit, seed = checked_samples(samples, method.most_examples(model)), checked_seed(seed)
    sample = sample_of(data, limit=limit, accepted=accepted_by(model), seed=seed)
    check_tokens(model, sample)
    sample = with_targets(model, sample)
    lengths = sequence_lengths(structure, sample) if length is None else [length] * len(structure.sublayers)
    rank, world = rank_and_world()
    if sample.examples < world:
        raise DataError(f"The sample has {sample.examples} examples for {world} processes; each needs at least one.")

    look = partial(method.measure, structure, seed=seed, stages=stages)
    # The limits of a latency are not final before it is met.
    limits = [] if target is None or target.latency is not None else target.limits(structure, lengths)
    first = sample
    # Stock shapes lose more at the same budget, and their refits gain more from further examples.
    few = target is not None and target.shape == "uneven" and bool(limits)
    if samples == "auto" and few and device.type == "cpu":
        some = sample.drawn(method.first_look(structure, sample), seed)
        first = some if sample.examples - some.examples >= world else sample  # every process gets some of the rest
    smallest = min((limit.ratio for limit in limits), default=1.0)
    expected = estimate(
        structure, sample, lengths, smallest, method.precision, first=first.examples, polish=method.polish
    )
    stages.say(str(expected))
    evidence, why = look(first.shard(rank, world)), ""
    if first is not sample:
        why = method.enough(evidence, structure, limits, lengths)
        if not why:
            evidence, first = look(sample.without(first).shard(rank, world), earlier=evidence), sample
    warnings = list(notes)
    if first.examples < FEW:
        warnings.append(
            f"the sample has only {count(first.examples, 'example')}; 2,048 are good, below {FEW} results vary a lot"
        )
    states = TeacherStates.on(device) if target is None else None
    return Plan(
        structure, first, method, method.finished(evidence), seed, lengths, stages.seconds, warnings, watcher,
        why=why, states=states, expected=expected,
    )  # fmt: skip


@eager()
def load_plan(path: str | os.PathLike[str], model: PreTrainedModel, data: Any, *, samples: int | None = None) -> Plan:
    """Load a saved measurement, given its model and batches again, which the refit needs."""
    structure = prunable(model)
    header, tensors = read_plan(Path(path))
    if header["sizes"] != structure.sizes:
        raise CheckpointError(f"{path} was measured on another model: it has {header['sizes']} units per layer.")
    if header["weights"] != weights_digest_of(structure.model):
        raise CheckpointError(f"{path} was measured on another model: same shapes, other weights. Measure this one.")
    method = method_of_plan(path, header)
    try:
        evidence = method.unpack(tensors, structure)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a plan that shearling saved: {error}") from None
    limit = header["examples"] if samples is None else samples
    sample = sample_of(data, limit=limit, accepted=accepted_by(structure.model), seed=header["seed"])
    check_tokens(structure.model, sample)
    sample = with_targets(structure.model, sample)
    warnings = list(header["warnings"])
    if header["fingerprint"] != sample.fingerprint:
        warnings.append("the plan was measured on another sample than the one given for the refit")
    return Plan(
        structure, sample, method, evidence, header["seed"], header["lengths"], dict(header["seconds"]), warnings,
        states=TeacherStates.on(device_of(structure.model)),
    )  # fmt: skip


def method_of_plan(path: str | os.PathLike[str], header: Mapping[str, Any]) -> Method:
    """The method that measured a saved plan, with its settings."""
    try:
        return configured(header["method"], **header["settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a plan that shearling saved: {error}") from None
