"""Polish: distil the student from the teacher on the same unlabelled sample, end to end, after the refit.

    loss = distance of the outputs + weight * mean over layers of || s - t ||^2 / || t - mean t ||^2

over the real tokens of each layer's hidden states s and t. The refit fits one projection at a time; what is left is
the interplay of the layers. One example in eight is kept out to judge (the distance of the outputs), and the best
state by that judge stays: the student is never worse on those examples than it was before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from shearling.engine.distil import Recipe, Trainer, trainable
from shearling.engine.distributed import gathered, rank_and_world
from shearling.engine.hooks import device_of, frozen
from shearling.engine.pools import pools_of
from shearling.engine.precision import fast_matmul
from shearling.engine.progress import Progress, silent
from shearling.engine.states import Watcher
from shearling.models.structure import Structure
from shearling.sample.sample import Sample

PASSES = 40
WORTH = 3e-3  # the share of the loss of removing everything from which on "auto" polishes
PATIENCE = 1.5  # times the seconds it may take, before it ends early


@dataclass(frozen=True)
class PolishSettings:
    """Whether and how long to polish: "auto" (where it is worth it), "off", passes (int) or seconds (float)."""

    mode: Literal["auto", "off"] | int | float = "auto"
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class Polished:
    """What came of it. The judge is the distance of the outputs on the examples kept out; None: polish did not run."""

    judge_before: float | None
    judge_after: float | None
    passes: int
    seconds: float
    examples: int
    kept: bool
    note: str = ""


def polish(
    teacher: Structure,
    student: Structure,
    sample: Sample,
    settings: PolishSettings,
    *,
    seed: int = 0,
    expected_loss: float | None = None,
    most_seconds: float | None = None,
    progress: Progress = silent,
) -> Polished:
    """Change the student in place; on the examples kept out it is never worse than it was.

    sample         all of it, also where several processes share the work: each takes the same steps
    expected_loss  the estimated loss of the units removed, as a share of the loss of removing all
    most_seconds   what "auto" may take on a CPU; a GPU always does all passes
    """
    reason = why_not(settings, expected_loss)
    if reason:
        return Polished(None, None, 0, 0.0, sample.examples, kept=False, note=reason)
    recipe = settings.recipe
    while True:
        try:
            found = _polish(teacher, student, sample, replace(settings, recipe=recipe), seed, most_seconds, progress)
        except KeyboardInterrupt:  # outside the passes: the student is as it was
            note = "interrupted before it was done; the student is as the refit left it"
            return Polished(None, None, 0, 0.0, sample.examples, kept=False, note=note)
        except torch.OutOfMemoryError:
            if recipe.examples == 1 or rank_and_world()[1] > 1:
                raise
            recipe = replace(recipe, examples=recipe.examples // 2)
        else:
            return gathered({rank_and_world()[0]: found})[0]


def _polish(
    teacher: Structure,
    student: Structure,
    sample: Sample,
    settings: PolishSettings,
    seed: int,
    most_seconds: float | None,
    progress: Progress,
) -> Polished:
    began = time.perf_counter()
    recipe, device = settings.recipe, device_of(student.model)
    with (
        frozen(teacher.model),
        frozen(student.model),
        fast_matmul(recipe.precision),
        trainable(student.model) as weights,
        Watcher(teacher, recipe.precision) as watch_t,
        Watcher(student, recipe.precision) as watch_s,
    ):
        trainer = Trainer(watch_t, watch_s, pools_of(sample, device), weights, recipe, seed)
        limit = _limit(settings, most_seconds, device)
        passes = _passes(settings, limit, began, trainer)
        deadline = None if limit is None else began + PATIENCE * limit
        with trainer.undone_on_error():
            done, note = trainer.train(passes, progress, deadline)
            kept = trainer.finish()
    seconds = time.perf_counter() - began
    return Polished(trainer.before, trainer.best, done, seconds, sample.examples, kept, note)


def why_not(settings: PolishSettings, expected_loss: float | None) -> str:
    """The reason not to polish, or nothing. Where polish follows, the refit should spare the judging examples."""
    if settings.mode == "off":
        return "polish is off"
    if settings.mode == "auto" and expected_loss is not None and expected_loss < WORTH:
        return f"the estimated loss is {expected_loss:.2g} of what removing everything would cost, less than {WORTH:g}"
    return ""


def _limit(settings: PolishSettings, most_seconds: float | None, device: torch.device) -> float | None:
    """Seconds that it may take; None where only passes count."""
    if isinstance(settings.mode, float):
        return settings.mode
    return most_seconds if settings.mode == "auto" and device.type == "cpu" else None


def _passes(settings: PolishSettings, limit: float | None, began: float, trainer: Trainer) -> int:
    """As many passes as asked for, or as many as the seconds that are left allow; at least one."""
    wanted = settings.mode if isinstance(settings.mode, int) else PASSES
    if limit is None:
        return wanted
    possible = max(1, int((limit - (time.perf_counter() - began)) / trainer.seconds_of_pass()))
    return possible if isinstance(settings.mode, float) else min(wanted, possible)
