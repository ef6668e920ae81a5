"""Polish: distil the student from the teacher on the same unlabelled sample, end to end, after the repair.

A repair fits one projection at a time and ignores interactions between layers. One example in eight is held out; the
state with the smallest distance of the outputs on these examples is kept, so that the student never gets worse on them.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shearling.engine.distil import Distiller, Recipe, trainable
from shearling.engine.distributed import gathered, on_first, rank_and_world
from shearling.engine.head import predicts_next_token
from shearling.engine.hooks import device_of, frozen
from shearling.engine.memory import out_of_memory
from shearling.engine.own_texts import with_own_texts
from shearling.engine.precision import Precision, kernels
from shearling.engine.progress import Progress, silent
from shearling.engine.targets import Observed
from shearling.errors import InputError
from shearling.models.structure import Structure
from shearling.sample.sample import Sample

Polish = Literal["auto", "off"] | int | str  # number of passes, or seconds as "30s"
PASSES = 40  # on a GPU
MANY = 20  # minimum passes for batches of the full size
FEW: dict[str, Any] = {"examples": 32, "tokens": 512}  # with fewer passes: smaller batches, and so more steps
FEW_RATE = 0.5  # their rate: the square root of their share of the examples per step
FULL_RATE = 12  # minimum passes for that rate: it first moves the student away, and few have no time to return
WIDTH, DEPTH = 384, 6  # of the models that the recipe's rate suits (MiniLM-L6)
FEWEST = 4  # fewer passes gain nothing (docs/method.md)
ROOM = 1.8  # duration of the passes on a CPU in dense ones: with the teacher's, about that of all stages before
OVERHEAD = 0.15  # duration of a pass without units, in dense passes
# Nats per example: "auto" polishes above this estimated loss. On a CPU the few passes gain nothing below it.
WORTH = {"cpu": 0.025, "cuda": 0.01}
PATIENCE = 1.5  # factor of the requested seconds after which it ends early


@dataclass(frozen=True)
class Polished:
    """The result: distance of the outputs on the held-out examples before and after, passes, seconds.

    why  the reason if it did not run or ended early
    own  number of texts that a language model wrote itself, beside the examples
    """

    before: float | None
    after: float | None
    passes: int
    seconds: float
    examples: int
    why: str = ""
    own: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The record's `polish`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def checked_polish(polish: Polish) -> Polish:
    """Check a setting."""
    seconds_of(polish)
    if isinstance(polish, bool) or (isinstance(polish, int) and polish < 1):
        raise InputError(_ASKED.format(polish))
    return polish


def seconds_of(polish: Polish) -> float | None:
    """The seconds of a setting such as "30s"; None for other settings."""
    if isinstance(polish, int) or polish in ("auto", "off"):
        return None
    try:
        seconds = float(str(polish).removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not str(polish).endswith("s") or not 0 < seconds < float("inf"):
        raise InputError(_ASKED.format(polish))
    return seconds


_ASKED = 'polish={!r} makes no sense; give "auto", "off", a number of passes, or seconds such as "30s".'


def polish(
    teacher: Structure,
    student: Structure,
    sample: Sample,
    setting: Polish,
    *,
    share: float,
    expected_loss: float | None = None,
    precision: Precision = "float32",
    recipe: Recipe | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Polished:
    """Train the student in place; it never gets worse on the held-out examples.

    sample  the whole sample, also with several processes: each takes the same steps
    share   cost of a student's pass relative to a dense one; on a CPU, cheaper students get more passes
    expected_loss  in nats per example, for "auto"; without an estimate it polishes
    precision  of the teacher's passes and of the student's steps, if the hardware has it
    """
    worth = WORTH.get(device_of(student.model).type, WORTH["cpu"])
    if setting == "auto" and expected_loss is not None and expected_loss < worth:
        why = f"not worth it: the estimated loss, {expected_loss:.2g} nats per example, is below {worth:g}"
        return Polished(None, None, 0, 0.0, sample.examples, why)
    passes = planned_passes(setting, share, student.model)
    if setting == "auto" and not passes:
        why = f"not worth it: in about the time of the rest a CPU does fewer than {FEWEST} passes, which gain nothing"
        return Polished(None, None, 0, 0.0, sample.examples, why)
    most, found, texts = sys.maxsize, None, None
    began = time.perf_counter()
    while True:
        try:
            texts = texts or on_first(lambda: with_own_texts(teacher.model, sample, seed))
            limit = seconds_of(setting)
            found = _polish(teacher, student, texts, passes, began, limit, precision, recipe, most, seed, progress)
        except KeyboardInterrupt:  # outside the passes: the student is unchanged
            why = "interrupted before it was done; the weights are as they were"
            found = Polished(None, None, 0, 0.0, sample.examples, why)
        except RuntimeError as error:
            if not out_of_memory(error) or rank_and_world()[1] > 1:
                raise
            if most == 1:
                why = "not enough memory, even for one example at a time; the weights are as they were"
                found = Polished(None, None, 0, 0.0, sample.examples, why)
        if found is not None:
            own = texts.examples - sample.examples if texts else 0
            found = replace(found, examples=sample.examples, own=own or None)
            return gathered({rank_and_world()[0]: found})[0]
        most = min(most, (recipe or recipe_for(passes, precision, teacher)).examples) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def recipe_for(passes: int, precision: Precision, structure: Structure) -> Recipe:
    """The default recipe for this number of passes and a model of this size."""
    recipe, pace = Recipe(precision=precision), _pace(structure)
    if passes >= MANY:
        return replace(recipe, rate=pace * recipe.rate)
    rate = FEW_RATE * math.sqrt(pace) * recipe.rate  # few passes gain from larger steps (docs/method.md)
    return replace(recipe, rate=rate * min(1.0, passes / FULL_RATE), **FEW)


def _pace(structure: Structure) -> float:
    """AdamW moves every weight equally far; the outputs move with the width, and with the root of the depth.

    Smaller models take the rate as it is: higher ones have not been tried.
    """
    width = max(int(sublayer.weight.shape[0]) for sublayer in structure.sublayers)
    depth = sum(stack.repeats * len(stack.layers) for stack in structure.stacks)
    return min(1.0, WIDTH / width * math.sqrt(DEPTH / depth))


def _polish(
    teacher: Structure,
    student: Structure,
    sample: Sample,
    passes: int,
    began: float,
    limit: float | None,
    precision: Precision,
    recipe: Recipe | None,
    most: int,
    seed: int,
    progress: Progress,
) -> Polished:
    """`began` is when the time of the stage, which `limit` may bound, began; `most` limits the examples of a batch."""

    def recipe_of(passes: int) -> Recipe:
        chosen = recipe or recipe_for(passes, precision, teacher)
        return chosen if chosen.examples <= most else replace(chosen, examples=most, tokens=0)

    chosen = recipe_of(passes)
    with (
        frozen(teacher.model),
        frozen(student.model),
        kernels(student.model, chosen.precision),
        trainable(student.model) as weights,
        Observed(teacher, precision, beside=student).watched() as dense,
        Observed(student, "float32").watched() as pruned,  # the distiller handles half precision
    ):
        distiller = Distiller(dense, pruned, sample, weights, chosen, seed)
        if limit is not None:
            seconds = distiller.seconds_of_pass()
            passes = max(1, int((limit - (time.perf_counter() - began)) / seconds))
            if (fitting := recipe_of(passes)) != chosen:
                distiller = Distiller(dense, pruned, sample, weights, fitting, seed)
        with distiller.undone_on_error():
            done, why = distiller.train(passes, progress, None if limit is None else began + PATIENCE * limit)
            if not distiller.finish():
                why = "; ".join(filter(None, [why, "no state was better than the first, which stays"]))
    seconds = time.perf_counter() - began
    return Polished(distiller.before, distiller.best, done, seconds, sample.examples, why)


def planned_passes(setting: Polish, share: float, model: Any) -> int:
    """The requested passes; by default 40 on a GPU, and on a CPU as many as take about as long as the run so far, or 0.

    Half of that for a language model, whose passes also go over texts of its own.

    The number depends only on sizes, not on timing, so that runs are reproducible.
    """
    if setting == "off":
        return 0
    if isinstance(setting, int):
        return setting
    most, room = (PASSES, ROOM) if not predicts_next_token(model) else (PASSES // 2, ROOM / 2)
    if device_of(model).type == "cuda":
        return most
    passes = min(most, round(room / (share + OVERHEAD)))
    return passes if passes >= FEWEST else 0
