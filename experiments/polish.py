"""What polish should match, how fast, how long and on how much: every variant against the default.

Where the models and the data are, pack two tasks (less than 64 MiB together: half precision, token ids instead of
texts, and only the rows of the embeddings that these texts use, in int8):

    python experiments/polish.py pack --models MODELS --data DATA --tasks sst2,stsb --out PACK

Where the GPU is (torch, transformers, numpy and safetensors; no tokenizer, no network), run what 8 minutes allow:

    PYTHONPATH=src python experiments/polish.py run --pack PACK --out RESULTS --minutes 8

`--graphs` replays steps as CUDA graphs. The same command goes on where it stopped; `--seeds 1`, `--budgets 0.2` or
`--only base,rate` (beginnings of names) ask for other points. Points are lines of RESULTS/polish.jsonl; several such
files in one folder, or under it, are shown together:

    python experiments/polish.py show --out RESULTS

How long a first call takes on a model of BERT-base's shape (random weights, 2,048 examples of GLUE's lengths) at 10%,
without and with CUDA graphs, each in a process of its own:

    PYTHONPATH=src python experiments/polish.py speed
    PYTHONPATH=src python experiments/polish.py speed --graphs
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packed import Row, Task, pack, padded
from torch import Tensor

import shearling.engine.polish as stage
import shearling.methods.surgeon as method
from shearling.engine.distil import Recipe, Trainer, squared_error
from shearling.engine.polish import PolishSettings, polish
from shearling.engine.states import States, Targets
from shearling.methods import Surgeon
from shearling.models.structure import structure_of
from shearling.pipeline import Plan, measure
from shearling.sample.sample import Batch
from shearling.surgeon.refit import refit

BUDGETS = (0.3, 0.2, 0.1, 0.05)


@dataclass(frozen=True)
class Variant:
    """Passes and recipe of the stage, and what only research asks for."""

    passes: int = 40
    recipe: Recipe = field(default_factory=Recipe)
    samples: int = 2048
    outputs: float = 1.0  # weight of the outputs
    layers: str = "all"  # all, last, odd
    kind: str = "default"  # of the output distance: default, logits (squared error), warm (temperature 2)
    scale: str = "layer"  # hidden states over the variance of the layer, or of every dimension
    touched: bool = False  # only weights inside the layers, not the head and the pooler
    average: float = 0.0  # decay of a moving average of the weights, which is what is judged and kept
    noise: float = 0.0  # share of tokens that another token of the batch takes the place of
    dropout: bool = False  # the student's own


def variants() -> dict[str, Variant]:
    """By name; the first ones are the most telling."""
    base = Variant()

    def recipe_with(**changes: Any) -> Variant:
        return replace(base, recipe=replace(base.recipe, **changes))

    return {
        "base": base,
        "outputs only": recipe_with(hidden=0.0),
        "rate 1e-3": recipe_with(rate=1e-3),
        "hidden only": replace(base, outputs=0.0),
        "hidden x 0.1": recipe_with(hidden=0.1),
        "hidden x 10": recipe_with(hidden=10.0),
        "last layer": replace(base, layers="last"),
        "odd layers": replace(base, layers="odd"),
        "rate 1e-4": recipe_with(rate=1e-4),
        "rate 6e-4": recipe_with(rate=6e-4),
        "rate 2e-3": recipe_with(rate=2e-3),
        "passes 10": replace(base, passes=10),
        "passes 10, rate 1e-3": replace(recipe_with(rate=1e-3), passes=10),
        "passes 20": replace(base, passes=20),
        "passes 80": replace(base, passes=80),
        "batch 32": recipe_with(examples=32),
        "batch 128": recipe_with(examples=128),
        "batch 128, rate 6e-4": recipe_with(examples=128, rate=6e-4),
        "batch 256, rate 1e-3": recipe_with(examples=256, rate=1e-3),
        "noise 0.1": replace(base, noise=0.1),
        "noise 0.3": replace(base, noise=0.3),
        "average 0.98": replace(base, average=0.98),
        "average 0.995": replace(base, average=0.995),
        "dropout": replace(base, dropout=True),
        "layers' weights only": replace(base, touched=True),
        "squared logits": replace(base, kind="logits"),
        "temperature 2": replace(base, kind="warm"),
        "variance of dimensions": replace(base, scale="dimension"),
        "weight decay 0.05": recipe_with(decay=0.05),
        "CUDA graphs": recipe_with(graphs=True),
        "bfloat16": recipe_with(precision="bfloat16"),
        "sample 512": replace(base, samples=512),
        "sample 1024": replace(base, samples=1024),
        "sample 4096": replace(base, samples=4096),
        "sample 8192": replace(base, samples=8192),
    }


class VariantTrainer(Trainer):
    """The stage's trainer with what only research asks for."""

    variant: Variant

    def __init__(self, teacher: Any, student: Any, pools: Any, weights: Any, *rest: Any) -> None:
        self.shadow: list[Tensor] | None = None
        if self.variant.touched:
            inside = {id(p) for s in student.structure.stacks for layer in s.layers for p in layer.parameters()}
            weights = {p: dtype for p, dtype in weights.items() if id(p) in inside}
        super().__init__(teacher, student, pools, weights, *rest)
        if self.variant.average:
            self.shadow = [w.detach().clone() for w in self.weights]
        if self.variant.noise:
            for targets in self.targets:
                targets.kept = None  # the teacher sees the changed tokens, too
        self.deviations = self._deviations() if self.variant.scale == "dimension" else None

    def step(self, targets: Targets, rows: Tensor) -> None:
        if self.variant.dropout:
            self.student.structure.model.train()
        super().step(targets, rows)
        if self.variant.dropout:
            self.student.structure.model.eval()
        if self.shadow is not None:
            torch._foreach_lerp_(self.shadow, [w.detach() for w in self.weights], 1 - self.variant.average)

    def loss(self, targets: Targets, rows: Tensor) -> Tensor:
        batch = targets.pool.pick(rows)
        if self.variant.noise:
            batch = noisy(batch, self.variant.noise)
        wanted = targets.pick(rows, batch)
        found = self.student(batch)
        total = self.recipe.hidden * self.hidden_loss(found, wanted, targets, rows)
        return total + self.variant.outputs * self.trained_distance(found, wanted, batch)

    def trained_distance(self, found: States, wanted: States, batch: Batch) -> Tensor:
        if self.variant.kind == "default" or self.config.num_labels == 1:
            return self.output_loss(found, wanted, batch)
        s, t = found.outputs["logits"].float(), wanted.outputs["logits"].float()
        if self.variant.kind == "logits":
            return (s - t).square().mean() / t.var(correction=0).clamp_min(1e-6)
        return 4 * torch.nn.functional.kl_div(
            (s / 2).log_softmax(-1), (t / 2).log_softmax(-1), reduction="batchmean", log_target=True
        )

    def hidden_loss(self, found: States, wanted: States, targets: Targets, rows: Tensor) -> Tensor:
        s, t, real = found.hidden[0], wanted.hidden[0], targets.real_tokens(0, rows)
        if self.deviations is None:
            errors = squared_error(s, t, real) / self.energies[0]
        else:
            errors = squared_error(s / self.deviations, t.float() / self.deviations, real)
        return {"all": errors, "last": errors[-1:], "odd": errors.flip(0)[::2]}[self.variant.layers].mean()

    def _deviations(self) -> Tensor:
        """[L, 1, D]: the teacher's standard deviation of every dimension."""
        targets = max(self.targets, key=lambda t: len(t.pool.examples))
        rows = targets.pool.places[:256].to(self.device)
        hidden = targets.pick(rows, targets.pool.pick(rows)).hidden[0].float().transpose(0, 1)  # [L, B, S, D]
        real = targets.real_tokens(0, rows)
        deviation = (hidden.flatten(1, 2) if real is None else hidden[:, real]).std(1, keepdim=True)  # [L, 1, D]
        return deviation.clamp_min(1e-3 * float(deviation.mean()))

    def _keep_if_better(self) -> None:
        if self.shadow is None:
            super()._keep_if_better()
            return
        now = [w.detach().clone() for w in self.weights]
        self._write(self.shadow)
        super()._keep_if_better()
        self._write(now)


def noisy(batch: Batch, share: float) -> Batch:
    """Some tokens replaced by the token at the same place of the next example, where both are real."""
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    both = (mask * mask.roll(1, 0)).bool()
    chosen = (torch.rand(ids.shape, device=ids.device) < share) & both
    return Batch(batch.inputs | {"input_ids": torch.where(chosen, ids.roll(1, 0), ids)}, {}, batch.indices)


@dataclass
class Store:
    """Points as JSON lines: a second run goes on where the first stopped."""

    file: Path

    def __post_init__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.known = {(p["task"], p["flops"], p["seed"], p["variant"]) for p in points_in(self.file.parent)}

    def add(self, point: Row) -> None:
        self.known.add((point["task"], point["flops"], point["seed"], point["variant"]))
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")


def points_in(folder: Path) -> list[Row]:
    found = []
    for path in sorted(folder.rglob("polish*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # the last line of a run that was stopped
                continue
    return found


def unpolished() -> Surgeon:
    """The method up to the refit."""
    return Surgeon(**({"polish": "off"} if "polish" in Surgeon.__dataclass_fields__ else {}))


class Runner:
    """Students are pruned once for every (task, sample size, seed, budget) and copied for each variant."""

    def __init__(self, options: argparse.Namespace) -> None:
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(device)
        self.folder = options.pack
        self.tasks: dict[str, Task] = {}
        self.plans: dict[Any, Plan] = {}
        self.students: dict[Any, Any] = {}

    def task(self, name: str) -> Task:
        if name not in self.tasks:
            self.tasks[name] = Task(name, self.folder / name, self.device)
        return self.tasks[name]

    def student(self, name: str, samples: int, seed: int, flops: float, *, polished: bool) -> tuple[Plan, Any]:
        """Where polish follows, the refit leaves the examples alone that polish is judged by."""
        key = (name, samples, seed)
        if key not in self.plans:
            self.plans.clear()
            self.students.clear()
            batches = self.task(name).batches(samples, seed)
            self.plans[key] = measure(self.task(name).model, batches, method=unpolished(), samples=samples, seed=seed)
        if (flops, polished) not in self.students:
            method.refit = partial(refit, all_examples=not polished)  # type: ignore[attr-defined]
            self.students[flops, polished] = self.plans[key].prune(flops=flops)
        return self.plans[key], self.students[flops, polished]

    def point(self, name: str, flops: float, seed: int, label: str, variant: Variant) -> Row:
        plan, pruned = self.student(name, variant.samples, seed, flops, polished=label != "none")
        lost = sum(float(o.error[len(o.removed) - len(k)]) for o, k in zip(plan.evidence, pruned.kept, strict=True))
        share = lost / sum(float(o.error[-1]) for o in plan.evidence)
        point = {
            "task": name, "flops": flops, "seed": seed, "variant": label, "dense": self.task(name).dense,
            "expected_loss": lost, "expected_share": share, "settings": asdict(variant), "device": str(self.device),
        }  # fmt: skip
        if label == "none":
            return point | {"value": self.task(name).score(pruned.model), "seconds": 0.0}
        model = copy.deepcopy(pruned.model)
        torch.manual_seed(seed)
        VariantTrainer.variant = variant
        settings = PolishSettings(variant.passes, variant.recipe)
        stage.Trainer = VariantTrainer  # type: ignore[misc]
        result = polish(plan.structure, structure_of(model), plan.sample, settings, seed=seed)
        return point | asdict(result) | {"value": self.task(name).score(model)}


def wanted_points(options: argparse.Namespace) -> Iterator[tuple[str, float, int, str, Variant]]:
    """The default at every budget first, then every variant at 10%, the most telling ones first."""
    known = {"none": Variant()} | variants()
    if options.graphs:
        known = {name: replace(v, recipe=replace(v.recipe, graphs=True)) for name, v in known.items()}
    tasks = options.tasks.split(",") if options.tasks else sorted(p.name for p in options.pack.iterdir() if p.is_dir())
    seeds = [int(seed) for seed in options.seeds.split(",")]
    budgets = [float(b) for b in options.budgets.split(",")] if options.budgets else None
    starts = options.only.split(",") if options.only else [""]
    chosen = {name: v for name, v in known.items() if any(name.startswith(start) for start in starts)}
    first = [name for name in ("none", "base") if name in chosen]
    for task in tasks:
        for seed in seeds:
            for flops in budgets or BUDGETS:
                yield from ((task, flops, seed, name, chosen[name]) for name in first)
    by_sample = sorted((v.samples, i, name) for i, (name, v) in enumerate(chosen.items()) if name not in first)
    usual = [name for samples, _, name in by_sample if samples == Variant().samples]
    for names in (usual, [name for _, _, name in by_sample if name not in usual]):
        for task in tasks:
            for seed in seeds:
                for name in names:
                    yield from ((task, flops, seed, name, chosen[name]) for flops in budgets or (0.1,))


def run(options: argparse.Namespace) -> None:
    """Every point that is wanted and not known, as far as the time goes."""
    began = time.monotonic()
    store, runner = Store(options.out / "polish.jsonl"), Runner(options)
    last = 0.0
    for task, flops, seed, name, variant in wanted_points(options):
        if (task, flops, seed, name) in store.known:
            continue
        start = time.monotonic()
        if options.minutes and start - began + last > 60 * options.minutes:
            print("out of time; the same command goes on from here", file=sys.stderr)
            break
        point = runner.point(task, flops, seed, name, variant)
        last = time.monotonic() - start
        store.add(point)
        judge = f"{point['judge_before']:.4f} -> {point['judge_after']:.4f}" if name != "none" else ""
        print(
            f"{task} {flops:g} seed {seed} {name}: {point['value']:.2f} (dense {point['dense']:.2f}) {judge} "
            f"in {point['seconds']:.1f} s", flush=True
        )  # fmt: skip
    show(options)


def show(options: argparse.Namespace) -> None:
    """Mean loss in points over the tasks and seeds, and the seconds, by budget and variant."""
    lines: dict[tuple[float, str], list[Row]] = {}
    for point in points_in(options.out):
        lines.setdefault((point["flops"], point["variant"]), []).append(point)
    tasks = sorted({p["task"] for points in lines.values() for p in points})
    order = ["none", *variants()]
    print("\nflops  variant                  " + "".join(f"{task:>8}" for task in tasks) + "    mean points  seconds")
    for (flops, name), points in sorted(lines.items(), key=lambda item: (-item[0][0], order.index(item[0][1]))):
        losses = {t: [p["dense"] - p["value"] for p in points if p["task"] == t] for t in tasks}
        cells = "".join(f"{statistics.fmean(losses[t]):8.2f}" if losses[t] else f"{'-':>8}" for t in tasks)
        means = [statistics.fmean(found) for found in losses.values() if found]
        mean = f"{statistics.fmean(means):8.2f}" if len(means) == len(tasks) else f"{'-':>8}"
        seconds = statistics.fmean(p["seconds"] for p in points)
        print(f"{flops:5g}  {name:25s}{cells}{mean} {len(points):6d} {seconds:8.1f}")


def speed(options: argparse.Namespace) -> None:
    """Seconds of every stage, polish included, in a process that has done nothing before."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = BertForSequenceClassification(BertConfig()).to(device).eval()
    lengths = np.random.default_rng(0).lognormal(3.3, 0.6, options.samples).clip(5, 128).astype(int)
    texts = [{"input_ids": torch.randint(1000, 30000, (n,)), "labels": torch.tensor(0.0)} for n in lengths.tolist()]
    batches = padded([text | {"token_type_ids": torch.zeros_like(text["input_ids"])} for text in texts])
    plan = measure(model, batches, method=unpolished(), samples=options.samples)
    pruned = plan.prune(flops=0.1)
    settings = PolishSettings(recipe=Recipe(graphs=options.graphs))
    spent = pruned.report.seconds
    most = spent["measure"] + spent["refit"]
    result = polish(plan.structure, structure_of(pruned.model), plan.sample, settings, most_seconds=most)
    print(json.dumps({"stages": spent, "measure_and_refit": most, "polish": asdict(result)}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="models and data into a small folder")
    packing.add_argument("--models", type=Path, required=True)
    packing.add_argument("--data", type=Path, required=True)
    packing.add_argument("--tasks", default="sst2,stsb")
    packing.add_argument("--out", type=Path, required=True)
    packing.set_defaults(command=lambda o: pack(o.models, o.data, o.tasks.split(","), o.out))
    running = commands.add_parser("run", help="points, as many as the time allows")
    running.add_argument("--pack", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--device")
    running.add_argument("--tasks", help="all that are packed, unless given")
    running.add_argument("--seeds", default="0")
    running.add_argument("--budgets", help="of every variant; the default runs at all, the others at 0.1, unless given")
    running.add_argument("--only", help="beginnings of variants' names")
    running.add_argument("--graphs", action="store_true", help="every variant with CUDA graphs")
    running.add_argument("--minutes", type=float)
    running.set_defaults(command=run)
    showing = commands.add_parser("show", help="the table of all points so far")
    showing.add_argument("--out", type=Path, required=True)
    showing.set_defaults(command=show)
    timing = commands.add_parser("speed", help="seconds of a first call on BERT-base's shape")
    timing.add_argument("--device")
    timing.add_argument("--samples", type=int, default=2048)
    timing.add_argument("--graphs", action="store_true")
    timing.set_defaults(command=speed)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("shearling").setLevel(logging.INFO)  # says where CUDA graphs cannot be had
    options.command(options)


if __name__ == "__main__":
    main()
