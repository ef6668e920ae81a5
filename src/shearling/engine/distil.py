"""One student learning from one teacher: batches, steps, the judge, and the best state so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shearling.engine.distance import output_distance, output_scale
from shearling.engine.distributed import add_up, rank_and_world
from shearling.engine.hooks import device_of
from shearling.engine.pools import Pool
from shearling.engine.precision import Precision
from shearling.engine.progress import Progress
from shearling.engine.states import States, Targets, Watcher, targets_of
from shearling.sample.sample import Batch

logger = logging.getLogger("shearling")
MAX_TOKENS = {"cpu": 8192, "cuda": 24576}  # of a batch
HALF = (torch.float16, torch.bfloat16)
JUDGED = 4  # batches' worth of examples are judged at once: no gradients take up memory
WARM_UP = 3  # steps before one is recorded as a CUDA graph


@dataclass(frozen=True)
class Recipe:
    """How a student is trained.

    rate      of AdamW, after a short warm-up and before a linear decay to zero
    examples  in a batch
    hidden    weight of the hidden states beside the outputs
    warm_up   share of the steps
    graphs    on a GPU, record one step for every shape as a CUDA graph and replay it
    """

    rate: float = 3e-4
    examples: int = 64
    hidden: float = 1.0
    warm_up: float = 0.05
    decay: float = 0.0
    graphs: bool = False
    precision: Precision = "tf32"  # steps are short: casting to bfloat16 costs more than it saves


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


@dataclass
class _Recording:
    """One step on the examples whose places are in `rows`."""

    rows: Tensor
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class Trainer:
    """The student on its way: batches, steps, the judge, and the best state so far."""

    def __init__(
        self,
        teacher: Watcher,
        student: Watcher,
        pools: Sequence[Pool],
        weights: dict[nn.Parameter, torch.dtype],
        recipe: Recipe,
        seed: int,
    ) -> None:
        self.student, self.recipe = student, recipe
        self.config = student.structure.model.config
        self.device = device_of(student.structure.model)
        self.weights, self.dtypes = list(weights), list(weights.values())
        self.generator = torch.Generator().manual_seed(seed)
        self.most_tokens = MAX_TOKENS.get(self.device.type, MAX_TOKENS["cpu"])
        self.targets = targets_of(teacher, pools, self.most_tokens)
        self.scale, self.energies = self._scales()
        cuda = self.device.type == "cuda"
        rate = torch.tensor(recipe.rate, device=self.device) if cuda else recipe.rate
        self.optimiser = torch.optim.AdamW(
            self.weights, lr=rate, weight_decay=recipe.decay, fused=cuda, foreach=not cuda, capturable=cuda
        )
        self.graphs = cuda and recipe.graphs and all(t.on(self.device) for t in self.targets)
        self.stream = torch.cuda.Stream(self.device) if self.graphs else None
        self.recordings: dict[tuple[int, int], _Recording] = {}
        self.judged = any(len(t.pool.judging) for t in self.targets)
        self.start = [w.detach().clone() for w in self.weights]
        self.best_state = self.start
        self.before = self.best = self.judge()

    def train(self, passes: int, progress: Progress, deadline: float | None = None) -> tuple[int, str]:
        """So many passes: (passes done, a note where it ended early)."""
        done = 0
        try:
            with self._streamed():
                for number in range(passes):
                    plan = self._plan()
                    for at, (targets, rows) in enumerate(plan):
                        step = number * len(plan) + at
                        self._set_rate(step / (passes * len(plan)))
                        self.step(targets, rows)
                        progress(step + 1, passes * len(plan))
                    done = number + 1
                    self._keep_if_better()
                    if deadline is not None and time.perf_counter() > deadline and done < passes:
                        return done, f"out of time after {done} of {passes} passes; the best state so far is kept"
        except KeyboardInterrupt:
            return done, f"interrupted after {done} of {passes} passes; the best state so far is kept"
        return done, ""

    def step(self, targets: Targets, rows: Tensor) -> None:
        """One step on the examples at these places of a pool."""
        if not self.graphs:
            self._step(targets, rows)
            return
        key = (id(targets), len(rows))
        recording = self.recordings.setdefault(key, _Recording(torch.empty_like(rows)))
        recording.rows.copy_(rows)
        if recording.graph is None and recording.runs >= WARM_UP:
            self._record(recording, targets)
        if recording.graph is None:
            self._step(targets, recording.rows)
            recording.runs += 1
        else:
            recording.graph.replay()

    def _step(self, targets: Targets, rows: Tensor) -> None:
        self.loss(targets, rows).backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def _record(self, recording: _Recording, targets: Targets) -> None:
        """A step as a CUDA graph; a model that asks its host something on the way cannot be recorded and runs as is."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._step(targets, recording.rows)
            recording.graph = graph
        except RuntimeError as error:
            logger.info("Polish runs without CUDA graphs: %s", error)
            self.graphs = False
            self.optimiser.zero_grad(set_to_none=True)

    @contextmanager
    def _streamed(self) -> Iterator[None]:
        """Graphs are recorded on a stream of their own, and so run the steps before them."""
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def loss(self, targets: Targets, rows: Tensor) -> Tensor:
        """A scalar: distance of the outputs, and of the hidden states."""
        batch = targets.pool.pick(rows)
        wanted = targets.pick(rows, batch)
        found = self.student(batch)
        distance = self.output_loss(found, wanted, batch)
        return distance + self.recipe.hidden * self.hidden_loss(found, wanted, targets, rows)

    def output_loss(self, found: States, wanted: States, batch: Batch) -> Tensor:
        """What the judge measures, too."""
        return output_distance(self.config, found.outputs, wanted.outputs, batch, self.scale)

    def hidden_loss(self, found: States, wanted: States, targets: Targets, rows: Tensor) -> Tensor:
        """Mean over layers of the squared error over the variance of the teacher's hidden states."""
        errors = [
            squared_error(hidden, wanted.hidden[stack], targets.real_tokens(stack, rows)) / self.energies[stack]
            for stack, hidden in found.hidden.items()
        ]
        return torch.cat(errors).mean()

    @torch.no_grad()
    def judge(self) -> float:
        """Mean distance of the outputs over the examples kept out (over all, where there are none)."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for targets in self.targets:
            places = targets.pool.judging if self.judged else targets.pool.fit
            for rows in places.to(self.device).split(self._size(targets.pool, JUDGED)) if len(places) else ():
                batch = targets.pool.pick(rows)
                distance = self.output_loss(self.student(batch), targets.pick(rows, batch), batch)
                total += torch.stack([distance.double() * len(rows), total.new_tensor(len(rows))])
        return float(total[0] / total[1])

    def finish(self) -> bool:
        """Leave the best state in the student, as its own precision holds it; whether it beats the start there.

        Several processes take the same steps and may round differently: the first one's weights are everyone's.
        """
        rounded = [value.to(dtype) for value, dtype in zip(self.best_state, self.dtypes, strict=True)]
        self._write(rounded)
        self.best = self.judge() if self.best < self.before else self.before
        kept = self.best < self.before
        if not kept:
            self._write(self.start)
            self.best = self.before
        self._agree()
        return kept

    def _agree(self) -> None:
        rank, world = rank_and_world()
        if world > 1:
            with torch.no_grad():
                for weight in self.weights:
                    weight.mul_(float(rank == 0))
                add_up([weight.data for weight in self.weights])

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """The student as it was, if something goes wrong."""
        try:
            yield
        except BaseException:
            self._write(self.start)
            raise

    def _keep_if_better(self) -> None:
        found = self.judge()
        if found < self.best:
            self.best, self.best_state = found, [w.detach().clone() for w in self.weights]

    def _write(self, state: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for weight, value in zip(self.weights, state, strict=True):
                weight.copy_(value)

    def seconds_of_pass(self) -> float:
        """Estimated from one batch of every pool; the first of all runs twice, to be warm."""
        total = 0.0
        for number, targets in enumerate([self.targets[0], *self.targets]):
            rows = targets.pool.places[: self._size(targets.pool)].to(self.device)
            start = time.perf_counter()
            self.loss(targets, rows).backward()
            self.optimiser.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if number:
                judging = len(targets.pool.judging) / 3  # a forward pass without the backward one
                total += (time.perf_counter() - start) * (len(targets.pool.fit) + judging) / len(rows)
        return total

    def _set_rate(self, share: float) -> None:
        """Up over the warm-up, then down to zero, by the share of the steps that are done."""
        up = self.recipe.warm_up
        factor = min((share + 1e-3) / up, 1.0) if share < up else (1 - share) / (1 - up)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.recipe.rate * factor)
            else:
                group["lr"] = self.recipe.rate * factor

    def _size(self, pool: Pool, times: int = 1) -> int:
        """Examples in a batch, or so many times more, as far as its tokens allow."""
        return max(1, min(times * self.recipe.examples, self.most_tokens // pool.tokens))

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
        return [steps[i] for i in order]

    def _scales(self) -> tuple[Tensor, dict[int, Tensor]]:
        """The scale of the outputs, and the variance of every layer's hidden states, from a batch of every pool."""
        outputs: list[Tensor] = []
        energies: dict[int, Tensor] = {}
        for targets in sorted(self.targets, key=lambda t: len(t.pool.examples)):  # the last one is the largest
            rows = targets.pool.places[: self._size(targets.pool)].to(self.device)
            states = targets.pick(rows, targets.pool.pick(rows))
            outputs += [value for name, value in states.outputs.items() if name == "logits" and value.dim() == 2]
            energies = {k: _variance(h, targets.real_tokens(k, rows)) for k, h in states.hidden.items()}
        scale = output_scale(self.config, torch.cat(outputs)) if outputs else torch.ones((), device=self.device)
        return scale, energies


def squared_error(found: Tensor, wanted: Tensor, real: Tensor | None) -> Tensor:
    """[L]: mean over real tokens and dimensions of (s - t)^2, for [B, L, S, D] and the tokens that are real [B, S]."""
    error = (found.float() - wanted.to(found.device).float()).square().mean(-1)  # [B, L, S]
    return error.mean((0, 2)) if real is None else (error * real[:, None]).sum((0, 2)) / real.sum().clamp_min(1)


def _variance(hidden: Tensor, real: Tensor | None) -> Tensor:
    """[L]: mean over dimensions of the variance over real tokens; a floor keeps constants from dividing by zero."""
    layers = hidden.float().transpose(0, 1)  # [L, B, S, D]
    tokens = layers.flatten(1, 2) if real is None else layers[:, real]  # [L, tokens, D]
    spread = tokens.var(1, correction=0).mean(-1)
    return spread.clamp_min(torch.finfo(torch.float32).tiny ** 0.5).maximum(1e-6 * tokens.square().mean((1, 2)))
