"""Repeat small steps without Python overhead: on a GPU they are replayed as CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

logger = logging.getLogger("shearling")

WARM_UP = 3


class Loop:
    """Repeats a step that modifies tensors in place and makes no decision on the host.

    On a GPU such a step is a few dozen tiny kernels whose launch costs far more than their execution, so it is
    recorded once as a CUDA graph and replayed. The warm-up steps before recording count as steps.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, times: int) -> None:
        """Run the step `times` times."""
        if self._device.type == "cuda" and self._graph is None and times > 2 * WARM_UP:
            self._graph = recorded(self._step, self._device)
            times -= WARM_UP
        step = self._step if self._graph is None else self._graph.replay
        with using_threads(1 if self._device.type == "cpu" else None):  # the steps are too small for several threads
            for _ in range(times):
                step()


def recorded(step: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Record the step as a CUDA graph, after running it `WARM_UP` times."""
    with torch.cuda.device(device):
        apart = torch.cuda.Stream()
        apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(apart):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(apart)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # On a stream of this device: PyTorch's own belongs to the device of the first recording.
        # "thread_local": other threads, such as a data loader's, may use CUDA meanwhile.
        with (
            torch.cuda.stream(apart),
            _tidied(pool),
            torch.cuda.graph(graph, pool=pool, stream=apart, capture_error_mode="thread_local"),
        ):
            step()  # recorded, not run
    return graph


@contextmanager
def _tidied(pool: Any) -> Iterator[None]:
    """End the allocations of a capture that failed: before PyTorch 2.12, `empty_cache` would raise from then on."""
    try:
        yield
    except BaseException:
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # the second before PyTorch 2.8
        end = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
        if end is not None:
            with suppress(RuntimeError):  # PyTorch has ended them
                end(torch.cuda.current_device(), pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise


class Replays:
    """Named steps; each is recorded as a CUDA graph on its second call and replayed from then on.

    A step reads its inputs from tensors at fixed addresses. Steps run eagerly without a GPU, or once one could not be
    recorded because it synchronises with the host.
    """

    def __init__(self, device: torch.device, *, record: bool = True) -> None:
        self._record = record and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._record else None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._record else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run and record steps on a stream of their own."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def __call__(self, name: Hashable, step: Callable[[], object]) -> None:
        """Run the step of this name once."""
        graph = self._graphs.get(name)
        if graph is None and self._record and name in self._graphs:
            graph = self._graphs[name] = self._recorded(step)
        if graph is not None:
            graph.replay()
        else:
            self._graphs[name] = None
            step()

    def _recorded(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        torch.cuda.synchronize()
        gc.disable()  # freeing a tensor of another stream would break the capture
        try:
            with _tidied(self._pool):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                except BaseException:  # also Ctrl-C: the stream must not go on capturing
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            logger.info("Continuing without CUDA graphs: %s", error)
            self._record = False
            return None
        finally:
            if collecting:
                gc.enable()
        return graph


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Set the number of CPU threads, restoring it afterwards; None changes nothing."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
