"""The model with named input and output tensors, captured by torch.export."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shearling.engine.hooks import frozen
from shearling.errors import ModelError
from shearling.exporters.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEFT_OUT = ("loss", "encoder_last_hidden_state")
AXES = ("batch", "length")


class Graph(nn.Module):
    """A wrapper whose forward takes only the named inputs and returns a dict of float32 tensors.

    torch.export reads the signature of `forward`, so it is created for these inputs. Floating inputs are cast to the
    model's dtype, so that a half-precision file has the same interface.
    """

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model

        def forward(*args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
            given = dict(zip(names, args, strict=False)) | kwargs
            inputs = {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in given.items()}
            outputs = model(**inputs, return_dict=True)
            return {k: v.float() for k, v in outputs.items() if isinstance(v, Tensor) and k not in LEFT_OUT}

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def reference(model: PreTrainedModel, batches: Sequence[Inputs]) -> list[dict[str, Tensor]]:
    """PyTorch's outputs for each batch."""
    graph = Graph(model, list(batches[0]))
    with frozen(model), torch.no_grad():
        return [graph(**batch) for batch in batches]


def axes(inputs: Inputs) -> dict[str, dict[int, str]]:
    """The dynamic axes of each input: batch, and length for tokens."""
    return {
        name: dict(enumerate(_axis_names(name)[: 1 if tensor.is_floating_point() else tensor.dim()]))
        for name, tensor in inputs.items()
    }


def _axis_names(name: str) -> tuple[str, str]:
    return (AXES[0], f"decoder_{AXES[1]}") if name.startswith("decoder_") else AXES


def capture(model: PreTrainedModel, inputs: Inputs) -> Any:
    """Capture the model as a `torch.export` program with dynamic axes."""
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {name: dict.fromkeys(varying, dynamic) for name, varying in axes(inputs).items()}
    with frozen(model), quiet_exporters():
        try:
            return torch.export.export(
                Graph(model, list(inputs)), (), kwargs=inputs, dynamic_shapes=shapes, strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )  # fmt: skip
        except Exception as error:  # the model's own code may raise anything under tracing
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(
                f"{type(model).__name__} cannot be captured by torch.export {torch.__version__}: {reason}"
            ) from error


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Silence warnings and log messages of exporters."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "root")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
