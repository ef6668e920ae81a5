"""Steps that are recorded once and replayed; what only a GPU shows is in tests/gpu."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shearling.engine.cuda_graph import WARM_UP, Loop, Replays, recorded


def test_on_a_cpu_steps_simply_run() -> None:
    total = torch.zeros(1)
    Loop(lambda: total.add_(1), torch.device("cpu")).run(10)
    assert total.item() == 10


def stand_in(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """Put stand-ins in the place of `torch.cuda`; returns the only stream."""
    stream = SimpleNamespace(wait_stream=lambda other: None, device=torch.device("cuda", 1))
    stand_ins: dict[str, Any] = {"device": lambda d: nullcontext(), "stream": lambda s: nullcontext()}
    stand_ins |= {"Stream": lambda *device: stream, "current_stream": lambda *device: stream, "CUDAGraph": object}
    stand_ins |= {"graph_pool_handle": lambda: (0, 1), "synchronize": lambda: None, "current_device": lambda: 1}
    for name, one in {**stand_ins, **more}.items():
        monkeypatch.setattr(torch.cuda, name, one)
    return stream


def test_a_step_is_recorded_on_a_stream_of_its_device_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default PyTorch records on a stream of the first device, and a loader thread that copies breaks it."""
    given: list[dict[str, Any]] = []

    def graph(recording: object, **options: Any) -> nullcontext[None]:
        given.append(options)
        return nullcontext()

    stream = stand_in(monkeypatch, graph=graph)
    steps: list[int] = []
    recorded(lambda: steps.append(1), torch.device("cuda"))
    assert given == [{"pool": (0, 1), "stream": stream, "capture_error_mode": "thread_local"}]
    assert len(steps) == WARM_UP + 1


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), KeyboardInterrupt()])
def test_a_failed_recording_ends_the_capture_and_its_allocations(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")
            raise RuntimeError("operation failed due to a previous error during capture")

    stand_in(monkeypatch, CUDAGraph=Graph)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, n=name: calls.append((n, *given)), raising=False)

    def step() -> None:
        calls.append("step")
        if "begin" in calls and "end" not in calls:
            raise error

    replays = Replays(torch.device("cuda", 1))
    replays("a", step)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        replays("a", step)
    ended = [("_cuda_endAllocateToPool", 1, (0, 1)), ("_cuda_releasePool", 1, (0, 1))]
    assert calls[:6] == ["step", "begin", "step", "end", *ended]
    assert calls[6:] == ([] if isinstance(error, KeyboardInterrupt) else ["step"])  # run eagerly instead
