"""Polish: distil the student from the teacher on the same unlabelled sample, end to end, after the refit.

    loss = distance of the outputs + weight * mean over layers of || s - t ||^2 / || t - mean t ||^2

over the real tokens of each layer's hidden states s and t. The refit fits one projection at a time; what is left is
the interplay of the layers. One example in eight is kept out to judge (the distance of the outputs), and the best
state by that judge stays: the student is never worse on those examples than it was before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shearling.engine.distance import output_distance, output_scale
from shearling.engine.distributed import add_up, gathered, rank_and_world
from shearling.engine.hooks import device_of, frozen
from shearling.engine.pools import Pool, pools_of
from shearling.engine.precision import Precision, fast_matmul
from shearling.engine.progress import Progress, silent
from shearling.engine.states import States, Targets, Watcher, targets_of
from shearling.models.structure import Structure
from shearling.sample.sample import Batch, Sample

PASSES = 40
WORTH = 1e-3  # estimated loss from which on `auto` polishes
MAX_TOKENS = {"cpu": 8192, "cuda": 24576}  # of a batch
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PolishSettings:
    """How to polish.

    mode      "auto": where it is worth it; "off"; a whole number of passes; or seconds, as a float
    rate      of AdamW, after a short warm-up and before a linear decay to zero
    examples  in a batch
    hidden    weight of the hidden states beside the outputs
    """

    mode: Literal["auto", "off"] | int | float = "auto"
    rate: float = 3e-4
    examples: int = 64
    hidden: float = 1.0
    warm_up: float = 0.05
    decay: float = 0.0
    precision: Precision = "bfloat16"


@dataclass(frozen=True)
class Polished:
    """What came of it. The judge is the distance of the outputs on the examples kept out."""

    judge_before: float
    judge_after: float
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
    """Change the student in place; the examples kept out never see it get worse.

    expected_loss  of the units removed, as the method estimates it: "auto" does nothing where it is small
    most_seconds   what "auto" may take on a CPU; a GPU always does all passes
    """
    began = time.perf_counter()
    reason = _why_not(settings, expected_loss)
    if reason:
        return Polished(0.0, 0.0, 0, 0.0, 0, False, reason)
    with (
        frozen(teacher.model),
        frozen(student.model),
        fast_matmul(settings.precision),
        trainable(student.model) as weights,
        Watcher(teacher, settings.precision) as watch_t,
        Watcher(student, settings.precision) as watch_s,
    ):
        pools = pools_of(sample, device_of(student.model))
        trainer = Trainer(watch_t, watch_s, pools, weights, settings, seed)
        limit = _limit(settings, most_seconds, device_of(student.model))
        passes = trainer.passes(PASSES if isinstance(settings.mode, str | float) else settings.mode, limit, began)
        done, note = trainer.train(passes, progress)
        kept = trainer.finish()
    seconds = time.perf_counter() - began
    return Polished(trainer.before, trainer.best, done, seconds, sample.examples, kept, note)


def _why_not(settings: PolishSettings, expected_loss: float | None) -> str:
    """The reason not to polish, if there is one."""
    if settings.mode == "off":
        return "polish is off"
    if settings.mode == "auto" and expected_loss is not None and expected_loss < WORTH:
        return f"the estimated loss of {expected_loss:.2g} is below {WORTH:.2g}: not worth polishing"
    return ""


def _limit(settings: PolishSettings, most_seconds: float | None, device: torch.device) -> float | None:
    """Seconds that it may take; None where only passes count."""
    if isinstance(settings.mode, float):
        return settings.mode
    return most_seconds if settings.mode == "auto" and device.type == "cpu" else None


@contextmanager
def trainable(model: nn.Module) -> Iterator[dict[nn.Parameter, torch.dtype]]:
    """Everything but embeddings takes gradients; a model in half precision is float32 meanwhile.

    Yields those parameters, and the precision each will have again.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.dtype for tensor in tensors]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = {p: p.dtype for p in model.parameters() if id(p) not in tables}
    try:
        for tensor in tensors:
            if tensor.dtype in HALF:
                tensor.data = tensor.data.float()
        for weight in weights:
            weight.requires_grad_()
        yield weights
    finally:
        for tensor, dtype in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(dtype)
        for weight in weights:
            weight.grad = None


class Trainer:
    """The student on its way: batches, steps, the judge, and the best state so far."""

    def __init__(
        self,
        teacher: Watcher,
        student: Watcher,
        pools: Sequence[Pool],
        weights: dict[nn.Parameter, torch.dtype],
        settings: PolishSettings,
        seed: int,
    ) -> None:
        self.student, self.settings = student, settings
        self.config = student.structure.model.config
        self.device = device_of(student.structure.model)
        self.weights, self.dtypes = list(weights), list(weights.values())
        self.generator = torch.Generator().manual_seed(seed)
        self.most_tokens = MAX_TOKENS.get(self.device.type, MAX_TOKENS["cpu"])
        self.targets = targets_of(teacher, pools, self.most_tokens)
        self.scale, self.energies = self._scales()
        cuda = self.device.type == "cuda"
        self.optimiser = torch.optim.AdamW(
            self.weights, lr=settings.rate, weight_decay=settings.decay, fused=cuda, foreach=not cuda
        )
        self.judged = any(len(t.pool.judging) for t in self.targets)
        self.start = [w.detach().clone() for w in self.weights]
        self.best_state = self.start
        self.before = self.best = self.judge()

    def train(self, passes: int, progress: Progress) -> tuple[int, str]:
        """So many passes: (passes done, a note where it ended early)."""
        done, step = 0, 0
        try:
            for number in range(passes):
                plan = self._plan()
                for at, (targets, rows) in enumerate(plan):
                    self._set_rate((number * len(plan) + at) / (passes * len(plan)))
                    self.step(targets, rows)
                    step += 1
                    progress(step, passes * len(plan))
                done = number + 1
                self._keep_if_better()
        except KeyboardInterrupt:
            return done, f"interrupted after {done} of {passes} passes; the best state so far is kept"
        return done, ""

    def step(self, targets: Targets, rows: Tensor) -> None:
        """One step on the examples at these places of a pool."""
        self.loss(targets, rows).backward()
        self._share_gradients()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def loss(self, targets: Targets, rows: Tensor) -> Tensor:
        """A scalar: distance of the outputs, and of the hidden states."""
        batch = targets.pool.pick(rows)
        wanted = targets.pick(rows, batch)
        found = self.student(batch)
        distance = self.output_loss(found, wanted, batch)
        return distance + self.settings.hidden * self.hidden_loss(found, wanted, targets, rows)

    def output_loss(self, found: States, wanted: States, batch: Batch) -> Tensor:
        """What the judge measures, too."""
        return output_distance(self.config, found.outputs, wanted.outputs, batch, self.scale)

    def hidden_loss(self, found: States, wanted: States, targets: Targets, rows: Tensor) -> Tensor:
        """Mean over layers of the squared error over the variance of the teacher's hidden states."""
        masks = [targets.real_tokens(number, rows) for number in range(len(targets.real))]
        errors = [
            (squared_error(s, t, masks[stack]) / energy.to(s.device)).to(self.device)
            for s, t, stack, energy in zip(found.hidden, wanted.hidden, wanted.stacks, self.energies, strict=True)
        ]
        return torch.stack(errors).mean()

    @torch.no_grad()
    def judge(self) -> float:
        """Mean distance of the outputs over the examples kept out (over all, where there are none)."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for targets in self.targets:
            places = targets.pool.judging if self.judged else targets.pool.fit
            chunks = places.to(self.device).split(self._size(targets.pool)) if len(places) else ()
            for rows in chunks:
                batch = targets.pool.pick(rows)
                distance = self.output_loss(self.student(batch), targets.pick(rows, batch), batch)
                total += torch.stack([distance.double() * len(rows), total.new_tensor(len(rows))])
        add_up([total])
        return float(total[0] / total[1])

    def finish(self) -> bool:
        """Leave the best state in the student, as its own precision holds it; whether it beats the start there."""
        rounded = [value.to(dtype) for value, dtype in zip(self.best_state, self.dtypes, strict=True)]
        self._write(rounded)
        self.best = self.judge() if self.best < self.before else self.before
        kept = self.best < self.before
        if not kept:
            self._write(self.start)
            self.best = self.before
        return kept

    def _keep_if_better(self) -> None:
        found = self.judge()
        if found < self.best:
            self.best, self.best_state = found, [w.detach().clone() for w in self.weights]

    def _write(self, state: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for weight, value in zip(self.weights, state, strict=True):
                weight.copy_(value)

    def passes(self, wanted: int, seconds: float | None, began: float) -> int:
        """How many passes: as many as wanted, or fewer where only so many seconds are left since it began."""
        if seconds is None:
            return wanted
        step = self._seconds_of_pass()
        left = seconds - (time.perf_counter() - began)
        possible = max(1, int(left / step))
        return max(1, min(wanted, *gathered({rank_and_world()[0]: possible}).values()))

    def _seconds_of_pass(self) -> float:
        """Estimated from one batch of every pool; the first of all runs twice, to be warm."""
        total = 0.0
        for number, targets in enumerate([self.targets[0], *self.targets]):
            size = min(self._size(targets.pool), max(1, len(targets.pool.fit)))
            start = time.perf_counter()
            self.loss(targets, targets.pool.places[:size].to(self.device)).backward()
            self.optimiser.zero_grad(set_to_none=True)
            if number:
                judging = len(targets.pool.judging) / 3  # a forward pass without the backward one
                total += (time.perf_counter() - start) * (len(targets.pool.fit) + judging) / size
        return total

    def _set_rate(self, share: float) -> None:
        """Up over the warm-up, then down to zero, by the share of the steps that are done."""
        up = self.settings.warm_up
        factor = min((share + 1e-3) / up, 1.0) if share < up else (1 - share) / (1 - up)
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate * factor

    def _size(self, pool: Pool) -> int:
        return max(1, min(self.settings.examples, self.most_tokens // pool.tokens))

    def _plan(self) -> list[tuple[Targets, Tensor]]:
        """One pass: every example once, in batches of one shape a pool; a short last batch is filled up."""
        steps = []
        for targets in self.targets:
            fit = targets.pool.fit
            drawn = fit[torch.randperm(len(fit), generator=self.generator)]
            size = self._size(targets.pool)
            if len(drawn) > size:
                drawn = torch.cat([drawn, drawn[: -len(drawn) % size]])
            steps += [(targets, rows) for rows in drawn.to(self.device).split(size) if len(rows)]
        order = torch.randperm(len(steps), generator=self.generator).tolist()
        return self._equal([steps[i] for i in order])

    def _equal(self, steps: list[tuple[Targets, Tensor]]) -> list[tuple[Targets, Tensor]]:
        """As many steps in every process: they wait for each other's gradients. Some of a shorter plan come twice."""
        most = max(gathered({rank_and_world()[0]: len(steps)}).values())
        return [steps[i % len(steps)] for i in range(most)]

    def _share_gradients(self) -> None:
        world = rank_and_world()[1]
        if world > 1:
            found = [w.grad for w in self.weights if w.grad is not None]
            add_up(found)
            torch._foreach_div_(found, world)

    def _scales(self) -> tuple[Tensor, list[Tensor]]:
        """The scale of the outputs, and the variance of every layer's hidden states, from a batch of every pool."""
        outputs: list[Tensor] = []
        energies: list[Tensor] = []
        for targets in sorted(self.targets, key=lambda t: len(t.pool.examples)):  # the last one is the largest
            rows = targets.pool.places[: self._size(targets.pool)].to(self.device)
            states = targets.pick(rows, targets.pool.pick(rows))
            outputs += [value for name, value in states.outputs.items() if name == "logits" and value.dim() == 2]
            masks = [targets.real_tokens(number, rows) for number in range(len(targets.real))]
            energies = [_variance(h, masks[stack]) for h, stack in zip(states.hidden, states.stacks, strict=True)]
        scale = output_scale(self.config, torch.cat(outputs)) if outputs else torch.ones((), device=self.device)
        return scale, energies


def squared_error(found: Tensor, wanted: Tensor, real: Tensor | None) -> Tensor:
    """Mean over real tokens and dimensions of (s - t)^2, for [B, S, D]."""
    error = (found.float() - wanted.to(found.device).float()).square().mean(-1)  # [B, S]
    return error.mean() if real is None else (error * real).sum() / real.sum().clamp_min(1)


def _variance(hidden: Tensor, real: Tensor | None) -> Tensor:
    """Mean over dimensions of the variance over real tokens; a floor keeps constant states from dividing by zero."""
    tokens = hidden.float().flatten(0, 1) if real is None else hidden.float()[real]
    spread = tokens.var(0, correction=0).mean()
    return spread.clamp_min(1e-6 * tokens.square().mean()).clamp_min(torch.finfo(torch.float32).tiny)
