"""What polish should match, how fast, how long and on how much: every variant against one base.

    python experiments/polish.py --models MODELS --data DATA --device cuda --seeds 0,1,2 --minutes 8

The same command goes on where it stopped. `--budgets 0.2` or `--only base,rate` (beginnings of names) ask for other
points. Points are lines of OUT/polish.jsonl; `--show` prints their table without running anything.
The few passes of a CPU: `--device cpu --only few: --limit 1500 --budgets 0.2,0.1`.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from common import Lab, Row, arguments, lab_of, recent, release
from polish_maps import Maps, map_distance
from polish_steps import EigenAdam, Muon
from torch import Tensor, nn
from torch.nn.utils import parametrize

import shearling.engine.polish as stage
from shearling.engine.distil import BETAS, REFRESH, Distiller, Recipe
from shearling.engine.polish import polish
from shearling.engine.targets import Bucket, States
from shearling.methods import Surgeon
from shearling.models.structure import structure_of

BUDGETS = (0.3, 0.2, 0.1, 0.05)
BASE = Recipe(rate=3e-4, examples=64)  # with new noise in every pass: what variants differ from


@dataclass(frozen=True)
class Variant:
    """Passes and recipe of the stage, and what only research asks for."""

    passes: int = stage.PASSES  # 0: as many as a CPU does by itself
    recipe: Recipe | None = BASE  # None: the stage's own for these passes
    samples: int = 2048
    outputs: bool = True  # whether they are matched
    layers: str = "all"  # all, last, odd
    weights: str = "all"  # layers: not the head and the pooler; small: norms and biases alone
    rank: int = 0  # of the changes to every weight matrix; 0: any
    layerwise: bool = False  # no gradient crosses a layer
    maps: float = 0.0  # weight of the attention maps of the kept heads
    average: float = 0.0  # decay of a moving average of the weights, which is what is judged and kept
    refresh: int = 1  # passes over the same noise
    optimiser: str = "adam"  # adam, muon, eigen
    matrix_rate: float = 5e-4  # of muon, for matrices
    betas: tuple[float, float] = BETAS
    fade: bool = False  # the weight of hidden states goes down to a tenth of itself


def variants() -> dict[str, Variant]:
    """By name; the first ones are the most telling."""
    base = Variant()

    def recipe(**changes: Any) -> Variant:
        return replace(base, recipe=replace(base.recipe, **changes))

    return {
        "base": base,
        "default": Variant(recipe=None, refresh=REFRESH["cuda"]),
        "hidden x 1": recipe(hidden=1.0),
        "no noise": recipe(noise=0.0),
        "passes 32, noise every 2": replace(base, passes=32, refresh=2),
        "noise every 4": replace(base, refresh=4),
        "short, rate 3e-4": replace(base, passes=6, refresh=6),
        "short, rate 6e-4": replace(recipe(rate=6e-4), passes=6, refresh=6),
        "short, rate 6e-4, no noise": replace(recipe(rate=6e-4, noise=0.0), passes=6),
        "short, rate 3e-4, no noise": replace(recipe(noise=0.0), passes=6),
        "noise 0.2": recipe(noise=0.2),
        "rate 6e-4": recipe(rate=6e-4),
        "rate 1e-4": recipe(rate=1e-4),
        "hidden x 3": recipe(hidden=3.0),
        "batch 32": recipe(examples=32),
        "batch 128, rate 4e-4": recipe(examples=128, rate=4e-4),
        "batch 128, rate 6e-4": recipe(examples=128, rate=6e-4),
        "batch 128, rate 6e-4, noise every 2": replace(recipe(examples=128, rate=6e-4), refresh=2),
        "batch 128, rate 3e-4, noise every 2": replace(recipe(examples=128, rate=3e-4), refresh=2),
        "batch 128, rate 1.5e-4, noise every 2": replace(recipe(examples=128, rate=1.5e-4), refresh=2),
        "batch 128, rate 7e-5, noise every 2": replace(recipe(examples=128, rate=7e-5), refresh=2),
        "average 0.98": replace(base, average=0.98),
        "outputs only": recipe(hidden=0.0),
        "hidden only": replace(base, outputs=False),
        "passes 80": replace(base, passes=80),
        "passes 20": replace(base, passes=20),
        "noise 0.3": recipe(noise=0.3),
        "sample 512": replace(base, samples=512),
        "sample 4096": replace(base, samples=4096),
        "sample 8192": replace(base, samples=8192),
        "layer by layer": replace(base, layerwise=True),
        "last layer": replace(base, layers="last"),
        "odd layers": replace(base, layers="odd"),
        "attention maps": replace(base, maps=1.0),
        "rank 8, rate 1e-3": replace(recipe(rate=1e-3), rank=8),
        "rank 32, rate 1e-3": replace(recipe(rate=1e-3), rank=32),
        "weights of layers only": replace(base, weights="layers"),
        "norms and biases only": replace(base, weights="small"),
        "hidden x 100": recipe(hidden=100.0),
        "rate 1e-3": recipe(rate=1e-3),
        "batch 16": recipe(examples=16),
        "passes 10": replace(base, passes=10),
        "passes 10, rate 1e-3": replace(recipe(rate=1e-3), passes=10),
        "average 0.995": replace(base, average=0.995),
        "TF32": recipe(precision="tf32"),
        "noise every 2": replace(base, refresh=2),
        "noise every 3": replace(base, refresh=3),
        "passes 24": replace(base, passes=24),
        "passes 24, rate 6e-4": replace(recipe(rate=6e-4), passes=24),
        "sample 1024": replace(base, samples=1024),
    }


def few_passes() -> dict[str, Variant]:
    """What a CPU does by itself, and what might make more of as few passes; run where `--only` asks for them."""
    base = Variant(passes=0, recipe=replace(BASE, noise=0.0), refresh=4)

    def few(name: str, weights: str = "all", **changes: Any) -> tuple[str, Variant]:
        known = {key: value for key, value in changes.items() if hasattr(base, key)}
        recipe = replace(base.recipe, **{key: value for key, value in changes.items() if key not in known})
        return f"few: {name}", replace(base, recipe=recipe, weights=weights, **known)

    wide = {
        7: (1.75e-4, 1e-4, 6.2e-5),
        5: (1.25e-4, 7.4e-5, 4.4e-5),
    }  # passes at 10 and 20%: rates, for a base-size model
    return dict([
        ("few: default", Variant(passes=0, recipe=None, refresh=4)),
        *(
            few(f"wide, {passes} passes, rate {rate:g}", passes=passes, examples=32, tokens=512, noise=0.1, rate=rate)
            for passes, rates in wide.items() for rate in rates
        ),
        few("8 passes, rate 2e-4, no noise", passes=8, examples=32, tokens=512, rate=2e-4),
        few("8 passes, rate 3e-4, no noise", passes=8, examples=32, tokens=512),
        few("8 passes, rate 5e-4, no noise", passes=8, examples=32, tokens=512, rate=5e-4),
        few("8 passes, rate 2e-4, noise once", passes=8, examples=32, tokens=512, rate=2e-4, noise=0.1, refresh=8),
        few("8 passes, rate 3e-4, noise once", passes=8, examples=32, tokens=512, noise=0.1, refresh=8),
        few("8 passes, rate 3e-4, noise twice", passes=8, examples=32, tokens=512, noise=0.1),
        few("8 passes, rate 2e-4, noise twice", passes=8, examples=32, tokens=512, rate=2e-4, noise=0.1),
        few("batch 64"),
        few("batch 32", examples=32),
        few("batch 32 + rate 1e-4", examples=32, rate=1e-4),
        few("batch 64 + rate 1e-4", rate=1e-4),
        few("batch 16", examples=16),
        few("batch 16 + rate 1e-4", examples=16, rate=1e-4),
        few("batch 64 + rate 1e-3", rate=1e-3),
        few("batch 64 + hidden states fade", fade=True),
        few("batch 32 + hidden x 30", examples=32, hidden=30.0),
        few("batch 16 + hidden x 30 + warm-up 0.2", examples=16, hidden=30.0, warm_up=0.2),
        few("batch 32 + betas 0.9 and 0.95 + warm-up 0.2", examples=32, betas=(0.9, 0.95), warm_up=0.2),
        few("batch 64 + layers only", weights="layers"),
        few("batch 64 + layers only + warm-up 0.3", weights="layers", warm_up=0.3),
        few("batch 64 + muon 1e-3", optimiser="muon", matrix_rate=1e-3),
        few("batch 64 + muon 3e-3", optimiser="muon", matrix_rate=3e-3),
        few("batch 64 + layers only + muon 5e-4", weights="layers", optimiser="muon"),
        few("batch 64 + layers only + muon 1e-3", weights="layers", optimiser="muon", matrix_rate=1e-3),
        few("batch 32 + layers only + muon 5e-4", weights="layers", optimiser="muon", examples=32),
        few("batch 64 + eigen", optimiser="eigen"),
        few("batch 64 + layers only + eigen", weights="layers", optimiser="eigen"),
        few("batch 32 + layers only + eigen", weights="layers", optimiser="eigen", examples=32),
        few("batch 64 + layers only + eigen + rate 1e-3", weights="layers", optimiser="eigen", rate=1e-3),
        few("batch 64 + layers only + eigen + average 0.9", weights="layers", optimiser="eigen", average=0.9),
        few("batch 64 + layers only + muon 5e-4 + hidden states fade", weights="layers", optimiser="muon", fade=True),
        few("batch 32 + layers only + muon 5e-4 + hidden states fade", weights="layers", optimiser="muon", examples=32,
            fade=True),
        few("batch 32 + layers only + eigen + hidden states fade", weights="layers", optimiser="eigen", examples=32,
            fade=True),
    ])  # fmt: skip


class VariantDistiller(Distiller):
    """The stage's distiller with what only research asks for."""

    variant: Variant
    maps: tuple[Maps, Maps, list[Tensor]] | None = None  # of the student, of the teacher; the kept heads

    def __init__(self, teacher: Any, student: Any, sample: Any, weights: Any, *rest: Any) -> None:
        self.shadow: list[Tensor] | None = None
        self.share = 0.0  # of the steps that are done
        inside = {id(p) for s in student.structure.stacks for layer in s.layers for p in layer.parameters()}
        if self.variant.weights == "layers":
            weights = {p: dtype for p, dtype in weights.items() if id(p) in inside}
        elif self.variant.weights == "small":
            weights = {p: dtype for p, dtype in weights.items() if p.dim() == 1}
        elif self.variant.rank:
            low = ("weight.0.left", "weight.0.right")
            named = dict(student.structure.model.named_parameters())
            weights = {p: p.dtype for name, p in named.items() if name.endswith(low) or p.dim() == 1}
        super().__init__(teacher, student, sample, weights, *rest)
        if self.variant.average:
            self.shadow = [w.detach().clone() for w in self.weights]

    def _optimiser(self) -> Any:
        rate, betas = self.recipe.rate, self.variant.betas
        if self.variant.optimiser == "muon":
            return Muon(self.changing, rate, betas, self.variant.matrix_rate / rate)
        if self.variant.optimiser == "eigen":
            drawn = cycle(self._shuffled())
            return EigenAdam(self.changing, rate, betas, lambda: self._given(*next(drawn)))
        found = super()._optimiser()
        for group in found.param_groups:
            group["betas"] = betas
        return found

    def _given(self, bucket: int, rows: Tensor) -> list[Tensor]:
        found = zip(self.gradients(self.buckets[bucket], rows), self.changing, strict=True)
        return [torch.zeros_like(w) if gradient is None else gradient for gradient, w in found]

    def _set_rate(self, share: float) -> None:
        super()._set_rate(share)
        self.share = share

    def step(self, bucket: int, rows: Tensor) -> None:
        super().step(bucket, rows)
        if self.shadow is not None:
            torch._foreach_lerp_(self.shadow, [w.detach() for w in self.weights], 1 - self.variant.average)

    def loss(self, bucket: Bucket, rows: Tensor) -> Tensor:
        if self.variant.outputs:
            found = super().loss(bucket, rows)
            return found if self.maps is None else found + self.variant.maps * self._map_loss(bucket, rows)
        batch = bucket.pick(rows)
        return self.hidden_loss(self.student(batch), bucket.wanted(rows, batch), bucket.real_tokens(rows))

    def _map_loss(self, bucket: Bucket, rows: Tensor) -> Tensor:
        """Of the student's last pass, which was on these examples."""
        student, teacher, kept = self.maps
        batch = bucket.pick(rows)
        with torch.no_grad():
            bucket.teacher(batch)
        return map_distance(student.caught, teacher.caught, kept, batch.inputs["attention_mask"].float())

    def hidden_loss(self, found: States, wanted: States, real: Any) -> Tensor:
        if self.variant.layers == "all":
            found_loss = super().hidden_loss(found, wanted, real)
            return found_loss * 10**-self.share if self.variant.fade else found_loss
        count = len(found.hidden)
        at = [count - 1] if self.variant.layers == "last" else range(count - 1, -1, -2)
        chosen = [States({}, [states.hidden[i] for i in at]) for states in (found, wanted)]
        kept, self.variances = self.variances, torch.stack([self.variances[i] for i in at])
        try:
            return super().hidden_loss(*chosen, [real[i] for i in at])
        finally:
            self.variances = kept

    def _keep_if_better(self) -> None:
        if self.shadow is None:
            super()._keep_if_better()
            return
        now = [w.detach().clone() for w in self.weights]
        self._write(self.shadow)
        super()._keep_if_better()
        self._write(now)


class LowRank(nn.Module):
    """W + left right."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.left = nn.Parameter(torch.zeros(rows, rank, device=weight.device))
        self.right = nn.Parameter(torch.randn(rank, columns, device=weight.device) / columns**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


def prepared(model: nn.Module, structure: Any, variant: Variant) -> None:
    if variant.rank:
        for module in list(model.modules()):
            if isinstance(module, nn.Linear) and min(module.weight.shape):
                parametrize.register_parametrization(module, "weight", LowRank(module.weight, variant.rank))
    if variant.layerwise:
        for stack in structure.stacks:
            for layer in stack.layers:
                layer.register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))


def point(
    lab: Lab, students: OrderedDict[Any, Any], task: str, flops: float, seed: int, name: str, variant: Variant
) -> Row:
    key = (task, variant.samples, seed, flops)
    plan = lab.plan(task, Surgeon(polish="off"), seed, variant.samples)
    pruned = recent(students, key, lambda: plan.prune(flops=flops))
    model = copy.deepcopy(pruned.model)
    exam, dense = lab.bench(task).exam, lab.bench(task).dense
    row: Row = {"task": task, "flops": flops, "seed": seed, "variant": name, "dense": dense, "device": lab.device}
    if name != "none":
        torch.manual_seed(seed)
        REFRESH["cuda"] = REFRESH["cpu"] = variant.refresh
        VariantDistiller.variant = variant
        stage.Distiller = VariantDistiller  # type: ignore[misc]
        structure = structure_of(model)
        prepared(model, structure, variant)
        passes = variant.passes or "auto"
        with ExitStack() as watching:
            maps = None
            if variant.maps:
                both = [watching.enter_context(Maps(of).watched()) for of in (model, plan.structure.model)]
                sublayers = zip(plan.structure.sublayers, pruned.kept, strict=True)
                maps = (*both, [units for sublayer, units in sublayers if sublayer.kind == "heads"])
            VariantDistiller.maps = maps
            found = polish(
                plan.structure, structure, plan.sample, passes,
                share=flops, recipe=variant.recipe, precision="bfloat16", seed=seed,
            )  # fmt: skip
        row |= found.to_json() | {"settings": asdict(variant)}
        release()
    return row | {"value": exam.take(model).value}


def wanted(lab: Lab, options: Any) -> Iterator[tuple[str, float, int, str, Variant]]:
    """The base at every budget first, then every variant at 10%, the most telling ones first."""
    known = {"none": Variant(), **variants(), **(few_passes() if options.only else {})}
    starts = options.only.split(",") if options.only else [""]
    chosen = {name: v for name, v in known.items() if any(name.startswith(start) for start in starts)}
    first = [name for name in ("none", "base") if name in chosen]
    budgets = [float(b) for b in options.budgets.split(",")] if options.budgets else None
    for seed in lab.seeds:
        for task in lab.tasks:
            for flops in budgets or BUDGETS:
                yield from ((task, flops, seed, name, chosen[name]) for name in first)
    for name in (name for name in chosen if name not in first):
        for seed in lab.seeds:
            for task in lab.tasks:
                yield from ((task, flops, seed, name, chosen[name]) for flops in budgets or (0.1,))


def points_in(folder: Path) -> list[Row]:
    lines = [line for path in sorted(folder.glob("polish*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def show(points: list[Row]) -> None:
    """Mean loss in points over tasks, and over seeds, of every variant and budget."""
    names = dict.fromkeys((p["variant"], p["flops"]) for p in points)
    tasks = sorted({p["task"] for p in points})
    print("| variant | FLOPs | " + " | ".join(tasks) + " | mean loss | judge | seconds |")
    print("|---" * (len(tasks) + 5) + "|")
    for name, flops in names:
        mine = [p for p in points if (p["variant"], p["flops"]) == (name, flops)]
        losses = {t: statistics.fmean([p["dense"] - p["value"] for p in mine if p["task"] == t] or [0]) for t in tasks}
        found = {p["task"] for p in mine}
        mean = statistics.fmean(losses[t] for t in found)
        judge = statistics.fmean(p.get("after", 0) / p.get("before", 1) for p in mine)
        seconds = statistics.fmean(p.get("seconds", 0) for p in mine)
        cells = " | ".join(f"{losses[t]:.2f}" if t in found else "-" for t in tasks)
        print(f"| {name} | {flops:.0%} | {cells} | {mean:.2f} | {judge:.2f} | {seconds:.1f} |")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--budgets", help="of every variant; by default the others than base run at 0.1 alone")
    parser.add_argument("--only", help="beginnings of variants' names")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "polish.jsonl"
    began, last = time.monotonic(), 0.0
    if not options.show:
        lab = lab_of(options)
        known = {(p["task"], p["flops"], p["seed"], p["variant"]) for p in points_in(options.out)}
        students: OrderedDict[Any, Any] = OrderedDict()
        for task, flops, seed, name, variant in wanted(lab, options):
            if (task, flops, seed, name) in known:
                continue
            start = time.monotonic()
            if options.minutes and start - began + last > 60 * options.minutes:
                print("out of time; the same command goes on from here", file=sys.stderr)
                break
            row = point(lab, students, task, flops, seed, name, variant)
            with store.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            last = time.monotonic() - start
    show(points_in(options.out))


if __name__ == "__main__":
    main()
