"""The grid of a sweep, and running it: measure once, prune and score many times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from shearling.engine.progress import Watcher
from shearling.errors import ConstraintError, InputError
from shearling.evaluation.exam import Evaluation, Exam
from shearling.methods import Method, method_of
from shearling.methods.ranges import Shape, checked_seed
from shearling.pipeline import Pruned, measure
from shearling.target import Target
from shearling.workflows.progress import quiet
from shearling.workflows.source import Loaded, Source, draw

N = TypeVar("N", int, float)
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # default budgets, of FLOPs
Key = tuple[str, tuple[tuple[str, float], ...], int]  # method, constraint, seed


@dataclass(frozen=True)
class Grid:
    """Methods by name, budgets such as {"flops": 0.5}, and seeds of the sample."""

    methods: Mapping[str, Method]
    budgets: Sequence[Mapping[str, float]]
    seeds: Sequence[int] = (0,)
    multiple_of: int | None = None
    table: Path | None = None
    shape: Shape = "uneven"

    def __post_init__(self) -> None:
        """Validate before any work is done."""
        for name, values in (("methods", self.methods), ("budgets", self.targets), ("seeds", self.seeds)):
            if not values:
                raise InputError(f"The sweep has no {name}; give at least one.")
        for seed in self.seeds:
            checked_seed(seed)
        if self.table is None and any("latency" in budget for budget in self.budgets):
            raise ConstraintError("A sweep over --latency needs a --table; make it with `shearling profile`.")

    @cached_property
    def targets(self) -> list[Target]:
        """A validated target per budget; they share the latency table."""
        how: dict[str, Any] = {"table": self.table, "multiple_of": self.multiple_of, "shape": self.shape}
        found: list[Target] = []
        for budget in self.budgets:
            found.append(Target(**(how | dict(budget))).checked())
            how["table"] = found[0].table
        return found

    def points(self) -> list[Key]:
        """All points, in order of execution."""
        return [key(m, b, s) for s in self.seeds for m in self.methods for b in self.budgets]


def grid_of(
    methods: str,
    seeds: str,
    multiple_of: int | None = None,
    table: Path | None = None,
    shape: Shape = "uneven",
    **budgets: str | None,
) -> Grid:
    """Parse a grid from comma-separated options; `budgets` by kind."""
    given = {
        kind: [_number(word, float, f"--{kind}") for word in _words(values)]
        for kind, values in budgets.items()
        if values is not None
    }
    return Grid(
        {name: method_of(name) for name in _words(methods)},
        budgets_of(given),
        [_number(word, int, "--seeds") for word in _words(seeds)],
        multiple_of,
        table,
        shape,
    )


def budgets_of(given: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """The budgets of a sweep from ratios by kind; only one kind is allowed."""
    if len(given) > 1:
        raise InputError(f"A sweep takes one kind of budget, not {' and '.join(given)} together.")
    kind, ratios = next(iter(given.items()), ("flops", RATIOS))
    return [{kind: ratio} for ratio in dict.fromkeys(ratios)]


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _number(word: str, kind: Callable[[str], N], option: str) -> N:
    try:
        return kind(word)
    except ValueError:
        raise InputError(f"{option} takes numbers, comma-separated; '{word}' is not a number.") from None


@dataclass(frozen=True)
class Outcome:
    """One point: a pruned model and its score, or the reason why there is none."""

    method: str
    constraint: Mapping[str, float]
    seed: int
    pruned: Pruned | None = None
    score: Evaluation | None = None
    problem: str = ""

    @property
    def key(self) -> Key:
        """The identity of this point."""
        return key(self.method, self.constraint, self.seed)


def key(method: str, constraint: Mapping[str, float], seed: int) -> Key:
    """The identity of a point of a sweep."""
    return method, tuple(sorted(constraint.items())), seed


def outcomes(
    source: Source,
    loaded: Loaded,
    exam: Exam,
    grid: Grid,
    *,
    done: Collection[Key] = (),
    watcher: Watcher = quiet,
) -> Iterator[Outcome]:
    """Run every point that is not `done`; measures only for methods and seeds with points to run."""
    total = len(grid.points())
    count = sum(one in done for one in grid.points())
    for seed in grid.seeds:
        for name, method in grid.methods.items():
            pairs = zip(grid.budgets, grid.targets, strict=True)
            wanted = [pair for pair in pairs if key(name, pair[0], seed) not in done]
            if not wanted:
                continue
            here, examples = replace(source, seed=seed), loaded.examples
            if seed != source.seed:
                examples = draw(here, loaded, method).examples
            plan = measure(
                loaded.model, examples, samples=here.samples, seed=seed, length=here.length, method=method,
                watcher=watcher, notes=loaded.notes,
            )  # fmt: skip
            for budget, target in wanted:
                watcher("sweep", count, total)
                point = Outcome(name, budget, seed)
                try:
                    pruned = plan.meet(target)
                except ConstraintError as error:  # other budgets may still be met
                    yield replace(point, problem=str(error))
                else:
                    score = exam.take(pruned.model, progress=partial(watcher, "evaluate"))
                    yield replace(point, pruned=pruned, score=score)
                count += 1
    watcher("sweep", total, total)
