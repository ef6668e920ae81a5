"""Timing of forward passes, eager or as CUDA graphs; models to be compared are run alternately."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from shearling.engine.cuda_graph import recorded
from shearling.engine.hooks import device_of
from shearling.errors import InputError
from shearling.models.structure import Structure
from shearling.schema import RUNTIMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Run = Callable[[], object]

HEAD_START = 2e9  # approximate GPU clock in Hz, for delaying the device until the host is ahead
LONGEST_WAIT = 2.0  # seconds
LONGEST_TURNS = 20.0  # approximate seconds


def check_runtime(runtime: str, device: torch.device) -> None:
    """Raise unless the runtime is known and supported on the device."""
    if runtime not in RUNTIMES:
        raise InputError(f"There is no runtime {runtime!r}; choose from {', '.join(RUNTIMES)}.")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"Models are timed on cpu and cuda; this one is on {device.type}.")
    if runtime == "graphs" and device.type != "cuda":
        raise InputError(f"CUDA graphs need an NVIDIA GPU, and the model is on {device.type}; use the runtime 'eager'.")


def runner(model: PreTrainedModel, example: dict[str, Tensor], runtime: str) -> Run:
    """A callable that runs one forward pass on the example."""
    run = partial(model, **example)
    if runtime == "eager":
        return run
    run()  # raises errors unrelated to graphs
    try:
        graph = recorded(run, device_of(model))
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the forward pass synchronises with or copies from the host
        why = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{type(model).__name__} cannot be recorded as a CUDA graph ({why}); use the runtime 'eager'."
        ) from error

    def replay(recorded_from: Run = run) -> None:  # keeps `run` alive: the graph reads its memory
        graph.replay()

    return replay


@dataclass(frozen=True)
class Timing:
    """One run: seconds of the device and, if timed separately, of the host.

    pace  seconds of the host for a fixed reference run at that moment, since the host's speed varies
    """

    seconds: float
    launch: float | None = None
    pace: float | None = None


@dataclass(frozen=True)
class Times:
    """Median and half the interquartile range of repeated runs."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        """Statistics of some timings."""
        low, middle, high = np.percentile(np.asarray(values, dtype=np.float64), (25, 50, 75))
        return cls(float(middle), float(high - low) / 2)

    @property
    def unsteadiness(self) -> float:
        """The spread relative to the median."""
        return self.spread / self.median


def wall(run: Run, device: torch.device) -> float:
    """Seconds from the call to the result: by CUDA events, or by the wall clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return _by_events(run, device)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def launching(run: Run, device: torch.device) -> float:
    """Seconds until the host has launched everything on an idle GPU."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    return taken


def both_sides(run: Run, device: torch.device, reference: Run) -> Timing:
    """One run on a GPU, with host and device timed separately."""
    launch, pace = launching(run, device), launching(reference, device)
    # The device sleeps while the host launches everything, so that it never waits for the host afterwards.
    with torch.cuda.device(device):
        torch.cuda._sleep(int(HEAD_START * min(1.5 * launch + 1e-4, LONGEST_WAIT)))
    return Timing(_by_events(run, device), launch, pace)


def _by_events(run: Run, device: torch.device) -> float:
    with torch.cuda.device(device):  # events belong to the current device, which need not be the model's
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def in_turns(runs: Sequence[Run], device: torch.device, *, rounds: int = 15) -> list[Times]:
    """Time runs alternately, in alternating order, after a warm-up, so that disturbances affect all equally."""
    for run in [*runs, *runs]:
        wall(run, device)
    values: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    for number in range(rounds):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            values[index].append(wall(runs[index], device))
        if number >= 4 and time.perf_counter() - begin > LONGEST_TURNS:
            break
    return [Times.of(v) for v in values]


def layer_shares(structure: Structure, run: Run, device: torch.device, *, rounds: int = 5) -> list[float]:
    """Per layer, its share of a forward pass, timed by hooks; the median of some runs."""
    layers = [layer for stack in structure.stacks for layer in stack.layers]
    spent = [[0.0] * len(layers) for _ in range(rounds)]
    begun = 0.0

    def start(module: nn.Module, args: object) -> None:
        nonlocal begun
        begun = _now(device)

    def stop(row: list[float], number: int, module: nn.Module, args: object, output: object) -> None:
        row[number] += _now(device) - begun  # layers that share weights run several times

    shares = []
    wall(run, device)
    for row in spent:
        with ExitStack() as hooks:
            for number, layer in enumerate(layers):
                hooks.callback(layer.register_forward_pre_hook(start).remove)
                hooks.callback(layer.register_forward_hook(partial(stop, row, number)).remove)
            whole = wall(run, device)
        shares.append([seconds / whole for seconds in row])
    return [statistics.median(values) for values in zip(*shares, strict=True)]


def _now(device: torch.device) -> float:
    """The time after synchronising with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """Model name of the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return _processor()
    return device.type


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"
