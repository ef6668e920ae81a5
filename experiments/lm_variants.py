"""`surgeon` and `paper` in the harness, and variants of `surgeon` that are still to be decided on.

A variant is written behind a colon, `surgeon:rounds=2,ridge=0.003`:

    rounds    measure anew on the way down: 2 prunes to the root of the share first, repairs, measures again
    batch     windows a step of polish; rate, hidden: of its recipe
    mix       share of the tokens that polish replaces
    random    1: by any of the vocabulary, in every other window, as measuring does, not by those of other windows
    blend     share of the streams' difference in the target of the refit; 1 is the default's
    own       0: polish without texts that the model writes itself
    others    any setting of the method; `polish` is off unless given
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from rivals.subject import Subject
from torch import Tensor

import shearling.engine.polish as stage
from shearling.costs import Limit, params_limit
from shearling.engine import repair, targets
from shearling.engine.layerwise import Captured
from shearling.engine.memory import batches_that_fit
from shearling.engine.polish import polish, recipe_for
from shearling.engine.progress import Stages
from shearling.methods import Method, Paper, Surgeon
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import Sublayer
from shearling.pipeline import WIDE, Plan, measure
from shearling.sample.read import accepted_by, sample_of
from shearling.sample.sample import Sample

METHODS: dict[str, Method] = {
    "surgeon": Surgeon(polish="off"),  # in closed form, as the rivals are
    "surgeon+polish": Surgeon(),
    "paper": Paper(),
}
REPAIR = ("refit", "realign", "ridge", "polish")  # settings that a measurement does not depend on
RECIPE = {"batch": "examples", "rate": "rate", "mix": "noise", "hidden": "hidden"}  # of polish


@dataclass(frozen=True)
class Variant:
    """The options of a variant, as they stand behind the colon."""

    method: Surgeon
    rounds: int = 1
    recipe: Mapping[str, Any] = field(default_factory=dict)
    random: bool = False
    blend: float = 1.0
    own: bool = True

    @staticmethod
    def read(words: str) -> Variant:
        """`rounds=2,ridge=0.003` as a variant."""
        kinds: dict[str, type] = dict.fromkeys(("rounds", "random", "own"), int)
        kinds |= {"batch": int, **dict.fromkeys(("rate", "mix", "hidden", "blend"), float)}
        kinds |= {field.name: type(field.default) for field in fields(Surgeon)}
        given = dict(word.split("=", 1) for word in words.split(","))
        wrong = sorted(set(given) - set(kinds))
        if wrong:
            raise SystemExit(f"No option {', '.join(wrong)} of a variant; there are {', '.join(kinds)}.")
        values: dict[str, Any] = {k: bool(int(v)) if kinds[k] is bool else kinds[k](v) for k, v in given.items()}
        rounds = values.pop("rounds", 1)
        passes = values.pop("polish", "off")
        recipe = {RECIPE[k]: values.pop(k) for k in RECIPE if k in values}
        blend = values.pop("blend", 1.0)
        random, own = bool(values.pop("random", 0)), bool(values.pop("own", 1))
        method = Surgeon(**values, polish=int(passes) if passes.isdigit() else passes)
        return Variant(method, rounds, recipe, random, blend, own)

    @property
    def measurement(self) -> str:
        """A name for what the dense model shows under these settings."""
        settings = {k: v for k, v in vars(self.method).items() if k not in REPAIR}
        return f"evidence {settings}"


def variant_of(name: str) -> Callable[[Subject, float], Any]:
    """The method of the library, or the variant, that a name stands for."""
    if name in METHODS:
        return lambda subject, share: _plan(subject, METHODS[name]).prune(params=share).model
    method, _, words = name.partition(":")
    if method != "surgeon" or not words:
        raise SystemExit(
            f"No method {name!r}: there are {', '.join(METHODS)}, surgeon:OPTION=VALUE,... and the rivals."
        )
    variant = Variant.read(words)
    return lambda subject, share: prune(subject, share, variant)


def _plan(subject: Subject, method: Method) -> Plan:
    """One measurement for every share, as `sweep` does."""
    data = [{"input_ids": ids, "labels": ids} for ids in subject.calibration.split(8)]
    plan: Plan = subject.once(method.name, lambda: measure(subject.model, data, method=method))
    return replace(plan, method=method)


def prune(subject: Subject, share: float, variant: Variant) -> Any:
    """Down in equal ratios; every step is chosen by what is left of the model, and repaired by the dense one."""
    sample: Sample = subject.once("sample", lambda: _sample(subject))
    student = subject.structure
    wide = min(s.units for s in student.sublayers if s.kind == "filters") >= WIDE
    step = variant.method.filter_step if wide else 1
    for number in range(1, variant.rounds + 1):
        evidence = _evidence(subject, student, sample, variant, first=number == 1)
        limit = _limit(subject, student, share ** (number / variant.rounds))
        kept = variant.method.choose(evidence, student, [limit], multiple_of=step, stages=Stages())
        student = _repaired(subject, student, kept, sample, variant)
    if variant.method.polish != "off":
        precision = variant.method.precision
        recipe = replace(recipe_for(int(variant.method.polish), precision, subject.structure), **variant.recipe)
        noise = partial(_from_vocabulary, subject.model.config.vocab_size) if variant.random else targets.noised
        texts = stage.with_own_texts if variant.own else lambda model, sample, seed: sample
        with patch.object(targets, "noised", noise), patch.object(stage, "with_own_texts", texts):
            polish(
                subject.structure, student, sample, variant.method.polish, share=share, precision=precision,
                recipe=recipe,
            )  # fmt: skip
    return student.model


def _from_vocabulary(size: int, tokens: Tensor, movable: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Random tokens in every other window."""
    windows = torch.rand(len(tokens), 1, generator=generator) < 0.5
    chosen = (torch.rand(tokens.shape, generator=generator) < share) & movable & windows
    return torch.where(chosen, torch.randint(size, tokens.shape, generator=generator, dtype=tokens.dtype), tokens)


def _sample(subject: Subject) -> Sample:
    data = [{"input_ids": ids} for ids in subject.calibration.split(8)]
    return sample_of(data, limit=len(subject.calibration), accepted=accepted_by(subject.model), seed=0)


def _evidence(subject: Subject, student: Structure, sample: Sample, variant: Variant, *, first: bool) -> Any:
    """Orders of the model as it is; those of the dense one are measured once."""

    def look() -> Any:
        return variant.method.finished(variant.method.measure(student, sample, seed=0, stages=Stages()))

    return subject.once(variant.measurement, look) if first else look()


def _limit(subject: Subject, student: Structure, share: float) -> Limit:
    """A share of the dense model's parameters as a share of what the student still has."""
    whole = params_limit(student, 1.0)
    ratio = share * subject.limit(1.0).dense / whole.dense
    return replace(whole, ratio=min(ratio, 1.0))


def _repaired(subject: Subject, student: Structure, kept: list[Tensor], sample: Sample, variant: Variant) -> Structure:
    whole = repair.target

    def target(sublayer: Sublayer, teacher: Captured, student: Captured) -> Tensor:
        return torch.lerp(teacher.o, whole(sublayer, teacher, student), variant.blend)  # type: ignore[arg-type]

    for attempt in batches_that_fit(sample, subject.device, backward=False, precision=variant.method.precision):
        with attempt as batches, patch.object(repair, "target", target):
            smaller = structure_of(shrink(student.model, kept))
            variant.method.repair(subject.structure, smaller, batches, stages=Stages())
    return smaller
