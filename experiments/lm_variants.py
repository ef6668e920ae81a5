"""`surgeon` and `paper` in the harness, and variants of `surgeon` that are still to be decided on.

A variant is written behind a colon, `surgeon:rounds=2,ridge=0.003`:

    rounds    measure anew on the way down: 2 prunes to the root of the share first, repairs, measures again
    damp, ridge, realign, refit    settings of the method
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from rivals.subject import Subject
from torch import Tensor

from shearling.costs import Limit, params_limit
from shearling.engine.memory import with_smaller_batches
from shearling.engine.progress import Stages
from shearling.methods import Surgeon
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.pipeline import WIDE, Plan, measure
from shearling.sample.read import accepted_by, sample_of
from shearling.sample.sample import Sample


@dataclass(frozen=True)
class Variant:
    """The options of a variant, as they stand behind the colon."""

    rounds: int = 1
    damp: float = Surgeon.damp
    ridge: float = Surgeon.ridge
    realign: bool = True
    refit: bool = True

    @staticmethod
    def read(words: str) -> Variant:
        """`rounds=2,ridge=0.003` as a variant."""
        kinds = {field.name: type(field.default) for field in fields(Variant)}
        given = dict(word.split("=", 1) for word in words.split(","))
        wrong = sorted(set(given) - set(kinds))
        if wrong:
            raise SystemExit(f"No option {', '.join(wrong)} of a variant; there are {', '.join(kinds)}.")
        values = {k: bool(int(v)) if kinds[k] is bool else kinds[k](v) for k, v in given.items()}
        return replace(Variant(), **values)

    @property
    def method(self) -> Surgeon:
        return Surgeon(damp=self.damp, ridge=self.ridge, realign=self.realign, refit=self.refit)


def variant_of(name: str) -> Callable[[Subject, float], Any]:
    """The method of the library, or the variant, that a name stands for."""
    if name in ("surgeon", "paper"):
        return lambda subject, share: _plan(subject, name).prune(params=share).model
    method, _, words = name.partition(":")
    if method != "surgeon" or not words:
        raise SystemExit(f"No method {name!r}: there are surgeon, paper, surgeon:OPTION=VALUE,... and the rivals.")
    variant = Variant.read(words)
    return lambda subject, share: prune(subject, share, variant)


def _plan(subject: Subject, method: str) -> Plan:
    """One measurement for every share, as `sweep` does."""
    data = [{"input_ids": ids, "labels": ids} for ids in subject.calibration.split(8)]
    plan: Plan = subject.once(method, lambda: measure(subject.model, data, method=method))
    return plan


def prune(subject: Subject, share: float, variant: Variant) -> Any:
    """Down in equal ratios; every step is chosen by what is left of the model, and repaired by the dense one."""
    sample: Sample = subject.once("sample", lambda: _sample(subject))
    student = subject.structure
    stages = Stages(None)
    wide = min(s.units for s in student.sublayers if s.kind == "filters") >= WIDE
    step = variant.method.filter_step if wide else 1
    for number in range(1, variant.rounds + 1):
        evidence = _evidence(subject, student, sample, variant, first=number == 1)
        limit = _limit(subject, student, share ** (number / variant.rounds))
        kept = variant.method.choose(evidence, student, [limit], multiple_of=step, stages=stages)
        student = _repaired(subject, student, kept, sample, variant)
    return student.model


def _sample(subject: Subject) -> Sample:
    data = [{"input_ids": ids} for ids in subject.calibration.split(8)]
    return sample_of(data, limit=len(subject.calibration), accepted=accepted_by(subject.model), seed=0)


def _evidence(subject: Subject, student: Structure, sample: Sample, variant: Variant, *, first: bool) -> Any:
    """Orders of the model as it is; those of the dense one are measured once."""

    def look() -> Any:
        return variant.method.finished(variant.method.measure(student, sample, seed=0, stages=Stages(None)))

    return subject.once(f"evidence {variant.damp}", look) if first else look()


def _limit(subject: Subject, student: Structure, share: float) -> Limit:
    """A share of the dense model's parameters as a share of what the student still has."""
    whole = params_limit(student, 1.0)
    ratio = share * subject.limit(1.0).dense / whole.dense
    return replace(whole, ratio=min(ratio, 1.0))


def _repaired(subject: Subject, student: Structure, kept: list[Tensor], sample: Sample, variant: Variant) -> Structure:
    def attempt(batches: Any) -> Structure:
        smaller = structure_of(shrink(student.model, kept))
        variant.method.repair(subject.structure, smaller, batches, stages=Stages(None))
        return smaller

    return with_smaller_batches(attempt, sample, subject.device, backward=False, precision=variant.method.precision)
