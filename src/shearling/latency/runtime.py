"""How a model is run while it is timed: call by call, or recorded once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shearling.engine.cuda_graph import recorded
from shearling.engine.hooks import device_of
from shearling.errors import InputError
from shearling.schema import RUNTIMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Replay:
    """A recorded run; what it was recorded from has to live as long, for the graph reads its memory."""

    run: Callable[[], object]
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()


def check_runtime(runtime: str, device: torch.device) -> None:
    """Raise unless models can be run in this way there."""
    if runtime not in RUNTIMES:
        raise InputError(f"There is no runtime {runtime!r}; choose from {', '.join(RUNTIMES)}.")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"Models are timed on cpu and cuda; this one is on {device.type}.")
    if runtime == "graphs" and device.type != "cuda":
        raise InputError(f"CUDA graphs need an NVIDIA GPU, and the model is on {device.type}; use the runtime 'eager'.")


def runner(model: PreTrainedModel, example: dict[str, Tensor], runtime: str) -> Callable[[], object]:
    """One forward pass of the model on the example, as often as it is called."""
    run = partial(model, **example)
    if runtime == "eager":
        return run
    run()  # what fails here has nothing to do with graphs
    try:
        return Replay(run, recorded(run, device_of(model)))
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the forward pass asks the device for something, or copies from the host
        why = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{type(model).__name__} cannot be recorded as a CUDA graph ({why}); use the runtime 'eager'."
        ) from error
