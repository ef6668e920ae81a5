"""Steps that are recorded once and replayed; what only a GPU shows is in tests/gpu."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shearling.engine.cuda_graph import WARM_UP, Loop, recorded


def test_on_a_cpu_steps_simply_run() -> None:
    total = torch.zeros(1)
    Loop(lambda: total.add_(1), torch.device("cpu")).run(10)
    assert total.item() == 10


def test_other_threads_may_use_the_gpu_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the default mode, a loader thread that copies to the GPU breaks the recording."""
    modes: list[Any] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def graph(recording: object, **options: Any) -> nullcontext[None]:
        modes.append(options.get("capture_error_mode"))
        return nullcontext()

    stand_ins = {"device": lambda d: nullcontext(), "stream": lambda s: nullcontext(), "Stream": lambda: stream}
    stand_ins |= {"current_stream": lambda: stream, "CUDAGraph": object, "graph": graph}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    steps: list[int] = []
    recorded(lambda: steps.append(1), torch.device("cuda"))
    assert modes == ["thread_local"]
    assert len(steps) == WARM_UP + 1
