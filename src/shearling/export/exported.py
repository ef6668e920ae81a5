"""torch.export programs: a `.pt2` file that runs where torch is, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shearling.errors import InputError
from shearling.export.check import Outputs, Runner
from shearling.export.graph import capture, hushed
from shearling.export.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require() -> None:
    """Nothing is needed but torch."""


def write(model: PreTrainedModel, inputs: Inputs, outputs: list[str], path: Path, *, precision: str) -> None:
    """The captured program as a file."""
    if precision == "int8":
        raise InputError("--int8 goes through ONNX Runtime; use it with --format onnx.")
    program = capture(model, inputs)
    with hushed():
        torch.export.save(program, path)


def open_runner(path: Path) -> Runner:
    """The file under PyTorch."""
    with hushed():
        module = torch.export.load(path).module()

    def run(inputs: Inputs) -> Outputs:
        with torch.inference_mode():
            return {name: tensor.numpy() for name, tensor in module(**inputs).items()}

    return run
