"""The two methods as the pipeline sees them: gather evidence, choose what stays, repair what is left.

Each is a small dataclass that says *what*; the mathematics lives in the stages it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from shearling.costs import Limit
from shearling.errors import ConstraintError, InputError
from shearling.models.structure import Structure, Sublayer
from shearling.moments import Moments
from shearling.paper.drop import sublayers_to_drop
from shearling.paper.fisher import block, mask_gradients
from shearling.paper.importance import Importance, importances
from shearling.paper.rearrange import rearrange
from shearling.paper.search import Piecewise, Prices, search
from shearling.paper.tune import DAMP as TUNE_DAMP
from shearling.paper.tune import apply, tune
from shearling.passes import with_halving
from shearling.sample import Sample
from shearling.stages import Stages
from shearling.surgeon.allocate import Curve, allocate
from shearling.surgeon.measure import measure
from shearling.surgeon.order import DAMP as ORDER_DAMP
from shearling.surgeon.order import Order, order
from shearling.surgeon.refit import RIDGE, refit
from shearling.walk import walk

Evidence = Sequence[Any]  # one entry a sublayer; what it is, the method knows


@dataclass(frozen=True)
class Repaired:
    """What became of one sublayer: its reconstruction error per token, and whether the repair is used."""

    sublayer: str
    before: float
    after: float
    used: bool
    note: str = ""


class Method(Protocol):
    """What the pipeline needs of a method."""

    name: ClassVar[str]

    def measure(self, structure: Structure, sample: Sample, *, seed: int, stages: Stages) -> Evidence:
        """Look at the dense model once; serves every budget."""

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The units that stay in each sublayer."""

    def repair(self, teacher: Structure, student: Structure, sample: Sample, *, stages: Stages) -> list[Repaired]:
        """Make up for the units that are gone, in place."""


@dataclass(frozen=True)
class Surgeon:
    """Label-free, one-shot, the default: structured optimal brain surgeon, then a ridge refit.

    refit    fit the output projections to the teacher afterwards
    realign  and, before that, what goes into the units
    labels   use the data's labels for the curvature, instead of labels drawn from the model
    """

    name: ClassVar[str] = "surgeon"
    refit: bool = True
    realign: bool = True
    labels: bool = False
    damp: float = ORDER_DAMP
    ridge: float = RIDGE

    def measure(self, structure: Structure, sample: Sample, *, seed: int, stages: Stages) -> list[Order]:
        """Curvature, then an order and an error curve for every sublayer."""
        with stages("measure") as progress:
            curvatures = with_halving(
                lambda s: measure(structure, s, seed=seed, labels=self.labels, progress=progress), sample
            )
        with stages("order") as progress:
            return order(curvatures, damp=self.damp, progress=progress)

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The counts with the least summed error within every budget, each filled by its sublayer's order."""
        with stages("allocate"):
            errors = [o.error.numpy()[::-1] for o in evidence]  # by units kept
            counts = allocate_counts(structure.sublayers, errors, limits, multiple_of)
            return [o.kept(count) for o, count in zip(evidence, counts, strict=True)]

    def repair(self, teacher: Structure, student: Structure, sample: Sample, *, stages: Stages) -> list[Repaired]:
        """Ridge refit of every output projection, bottom-up."""
        if not self.refit:
            return []
        notes: list[Repaired] = []

        def one(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
            result = refit(sublayer.weight, sublayer.bias, fit, held_out, ridge=self.ridge)
            if result.kept:
                sublayer.write(result.weight, result.bias)
            note = "" if result.kept else "the refit did not carry over to the held-out examples and was dropped"
            notes.append(Repaired(sublayer.name, result.before, result.after, result.kept, note))
            return True

        def into(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
            eye = torch.eye(len(fit.gram), dtype=torch.float64, device=fit.gram.device)
            bias = eye.new_zeros(len(eye)) if sublayer.inputs_have_bias else None
            result = refit(eye, bias, fit, held_out, ridge=self.ridge)
            if result.kept:
                sublayer.fold_inputs(result.weight, result.bias)
            return True

        with stages("refit") as progress:
            walk(teacher, student, sample, one, realign=into if self.realign else None, progress=progress)
        return notes


@dataclass(frozen=True)
class Paper:
    """The paper, faithfully: Fisher search, rearrangement, tuning; and the baselines it is compared with.

    importance  what a unit is worth in the search
    allocation  `searched` (Alg. 1, 2), or `uniform`: the same ratio in every layer
    drop_sublayers  where the layers' overheads alone exceed a latency, drop whole sublayers until they do not
    """

    name: ClassVar[str] = "paper"
    importance: Importance = "fisher"
    allocation: Literal["searched", "uniform"] = "searched"
    rearrange: bool = True
    tune: bool = True
    damp: float = TUNE_DAMP
    seed: int = 0
    drop_sublayers: bool = True

    def measure(self, structure: Structure, sample: Sample, *, seed: int, stages: Stages) -> list[Tensor]:
        """Per-example gradients of the masks; against a sampled loss where the data has no labels."""
        with stages("gradients") as progress:
            return with_halving(
                lambda s: mask_gradients(structure, s, seed=seed, labels=s.has_labels, progress=progress), sample
            )

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """Search, then rearrange."""
        sublayers = structure.sublayers
        with stages("search"):
            worth = importances(self.importance, sublayers, evidence, self.seed)
            if self.allocation == "uniform":
                kept = _best(worth, _uniform_counts(sublayers, limits, multiple_of))
            elif multiple_of == 1 and _prices(sublayers, limits):
                kept = _searched(sublayers, worth, limits, drop=self.drop_sublayers)
            else:  # Differs from the paper: prices that vary between layers need the general solver
                lost = [np.concatenate([[0.0], np.cumsum(np.sort(w.numpy()))])[::-1] for w in worth]
                kept = _best(worth, allocate_counts(sublayers, lost, limits, multiple_of))
        if self.rearrange:
            with stages("rearrangement"):
                kept = rearrange([block(gradients) for gradients in evidence], kept)
        return kept

    def repair(self, teacher: Structure, student: Structure, sample: Sample, *, stages: Stages) -> list[Repaired]:
        """Mask tuning, bottom-up; a mask out of range ends it, and the last note says so."""
        if not self.tune:
            return []
        notes: list[Repaired] = []

        def one(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
            if not sublayer.units:
                return True
            result = tune(sublayer.weight, sublayer.bias, fit + held_out, sublayer.width, damp=self.damp)
            if result.accepted:
                sublayer.write(apply(sublayer.weight, result.mask, sublayer.width), sublayer.bias)
                notes.append(Repaired(sublayer.name, result.before, result.after, True))
                return True
            worst = float(result.mask.abs().max())
            note = f"a mask of {worst:.3g} is outside [-10, 10]: discarded, and tuning stopped here"
            notes.append(Repaired(sublayer.name, result.before, result.before, False, note))
            return False

        with stages("tuning") as progress:
            walk(teacher, student, sample, one, progress=progress)
        return notes


def method_of(method: str | Method) -> Method:
    """A method by name, or as it is."""
    if not isinstance(method, str):
        return method
    known: dict[str, type[Surgeon] | type[Paper]] = {"surgeon": Surgeon, "paper": Paper}
    if method not in known:
        raise InputError(f"No method '{method}'; there are {', '.join(sorted(known))}.")
    return known[method]()


def configured(method: str, **settings: Any) -> Method:
    """A method by name with those of the settings that it has; the others must not have been changed for it."""
    chosen = type(method_of(method))
    known = {f.name: f for f in fields(chosen)}  # type: ignore[arg-type]
    for name, allowed in (("importance", get_args(Importance)), ("allocation", ("searched", "uniform"))):
        if name in settings and settings[name] not in allowed:
            raise InputError(f"{name}={settings[name]!r} is not known; there are {', '.join(allowed)}.")
    other = Paper if chosen is Surgeon else Surgeon
    for field in fields(other):
        if field.name not in known and settings.get(field.name, field.default) != field.default:
            raise InputError(f"'{field.name}' is an option of method {other.name}, not of {chosen.name}.")
    return chosen(**{name: value for name, value in settings.items() if name in known})


def allocate_counts(
    sublayers: Sequence[Sublayer], errors: Sequence[Any], limits: Sequence[Limit], multiple_of: int
) -> list[int]:
    """The best counts for errors given by units kept ([units + 1] per sublayer)."""
    curves = []
    for number, (sublayer, error) in enumerate(zip(sublayers, errors, strict=True)):
        counts = np.arange(min(sublayer.floor, sublayer.units), sublayer.units + 1)
        if sublayer.kind == "filters" and multiple_of > 1:
            counts = counts[(counts % multiple_of == 0) | (counts == sublayer.units)]
        costs = np.stack([limit.tables[number][counts] for limit in limits])
        curves.append(Curve(counts, np.asarray(error)[counts], costs))
    try:
        return allocate(curves, [limit.budget for limit in limits])
    except ConstraintError as error:
        raise ConstraintError(f"{asked(limits)} cannot be met. {error}") from None


def asked(limits: Sequence[Limit]) -> str:
    """The constraints in words, each once."""
    return ", ".join(dict.fromkeys(f"{limit.name}={limit.ratio:g}" for limit in limits))


def _prices(sublayers: Sequence[Sublayer], limits: Sequence[Limit]) -> list[Prices]:
    """The limits as Alg. 1 and 2 want them; empty where units of a kind differ in price, or some must stay."""
    if any(s.floor for s in sublayers):
        return []
    prices = []
    for limit in limits:
        found: dict[str, set[Piecewise]] = {"heads": set(), "filters": set()}
        for sublayer, piece in zip(sublayers, _pieces(sublayers, limit), strict=True):
            if sublayer.units:
                found[sublayer.kind].add(piece)
        if any(len(values) > 1 for values in found.values()):
            return []
        head, filter_ = (next(iter(found[kind]), Piecewise(0.0)) for kind in ("heads", "filters"))
        prices.append(Prices(head, filter_, limit.budget))
    return prices


def _pieces(sublayers: Sequence[Sublayer], limit: Limit) -> Sequence[Piecewise]:
    """What each sublayer costs: the limit's own fit, or the straight line its table is."""
    if limit.pieces:
        return limit.pieces
    pairs = zip(sublayers, limit.tables, strict=True)
    return [Piecewise(round(float(table[-1]) / max(s.units, 1), 6)) for s, table in pairs]


def _searched(
    sublayers: Sequence[Sublayer], worth: Sequence[Tensor], limits: Sequence[Limit], *, drop: bool
) -> list[Tensor]:
    """Alg. 1 or 2. A fit is not the table: where its answer costs more than the table allows, it gets less to spend."""
    allowed = list(limits)
    while True:
        kept = _search_once(sublayers, worth, allowed, drop=drop)
        counts = [len(units) for units in kept]
        if all(limit.holds(counts) for limit in limits):
            return kept
        for number, limit in enumerate(limits):
            if not limit.holds(counts):
                excess = max(limit.spent(counts) - limit.budget, 1e-3 * limit.budget)
                less = allowed[number]
                allowed[number] = replace(less, fixed=less.fixed + excess, whole=limit.dense)


def _search_once(
    sublayers: Sequence[Sublayer], worth: Sequence[Tensor], limits: Sequence[Limit], *, drop: bool
) -> list[Tensor]:
    if drop and any(limit.pieces for limit in limits):
        pieces = [_pieces(sublayers, limit) for limit in limits]
        gone = sublayers_to_drop(worth, pieces, [limit.budget for limit in limits])
        worth = [w[:0] if i in gone else w for i, w in enumerate(worth)]
    rows = {kind: [i for i, s in enumerate(sublayers) if s.kind == kind] for kind in ("heads", "filters")}
    try:
        heads, filters = ([worth[i] for i in rows[kind]] for kind in ("heads", "filters"))
        found = search(heads, filters, _prices(sublayers, limits))
    except ConstraintError as error:
        raise ConstraintError(f"{asked(limits)} cannot be met. {error}") from None
    kept = dict(zip(rows["heads"] + rows["filters"], found[0] + found[1], strict=True))
    return [kept[i] for i in range(len(sublayers))]


def _uniform_counts(sublayers: Sequence[Sublayer], limits: Sequence[Limit], multiple_of: int) -> list[int]:
    """The largest ratio, the same in every layer, that is within every budget; filters in whole multiples."""

    def count(sublayer: Sublayer, ratio: float) -> int:
        units = int(ratio * sublayer.units + 1e-9)
        if sublayer.kind == "filters" and units < sublayer.units:
            units -= units % multiple_of
        return max(sublayer.floor, units)

    def counts(ratio: float) -> list[int]:
        return [count(s, ratio) for s in sublayers]

    low, high = 0.0, 1.0
    if all(limit.holds(counts(high)) for limit in limits):
        return counts(high)
    for _ in range(40):
        middle = (low + high) / 2
        if all(limit.holds(counts(middle)) for limit in limits):
            low = middle
        else:
            high = middle
    return counts(low)


def _best(worth: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The most important `count` units of every sublayer."""
    ranked = (torch.sort(w, descending=True, stable=True).indices for w in worth)
    return [r[:count].sort().values for r, count in zip(ranked, counts, strict=True)]
