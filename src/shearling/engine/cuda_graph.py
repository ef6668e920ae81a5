"""Run one small step thousands of times without waiting for Python: on a GPU, replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

WARM_UP = 3


class Loop:
    """Repeats a step that works on tensors in place and takes no decisions on the host.

    On a GPU such a step is a few dozen tiny kernels, and launching them costs far more than running them. So the step
    is recorded once, as a CUDA graph, and replayed. The first steps run as they are; they count like the others.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, times: int) -> None:
        """So many steps."""
        if self._device.type == "cuda" and self._graph is None and times > 2 * WARM_UP:
            self._graph = recorded(self._step, self._device)
            times -= WARM_UP
        step = self._step if self._graph is None else self._graph.replay
        with using_threads(1 if self._device.type == "cpu" else None):  # too little work to share, and threads wait
            for _ in range(times):
                step()


def recorded(step: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph; on the way it has run `WARM_UP` times."""
    with torch.cuda.device(device):
        apart = torch.cuda.Stream()
        apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(apart):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, such as those of a loader, may go on using CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()  # recorded, not run
    return graph


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """So many threads on the CPU, and as many as before afterwards."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
