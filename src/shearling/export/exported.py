"""torch.export programs: a `.pt2` file that runs where torch is, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shearling.export.check import Outputs, Runner
from shearling.export.formats import Job
from shearling.export.graph import capture, hushed
from shearling.export.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NEEDED = ("torch",)
EXTRA = ""
SUFFIX = ".pt2"
PRECISIONS = ("float32", "float16")


def unsuited(model: PreTrainedModel) -> str | None:
    """Nothing is refused beforehand: torch tells where it cannot trace a model."""
    return None


def part(model: PreTrainedModel) -> PreTrainedModel:
    """The whole model is written."""
    return model


def runtime() -> str:
    """What runs the file."""
    return f"PyTorch {torch.__version__}"


def write(job: Job) -> None:
    """The captured program as a file."""
    program = capture(job.typed_model(), job.inputs)
    with hushed():
        torch.export.save(program, job.path)


def open_runner(path: Path) -> Runner:
    """The file under PyTorch."""
    with hushed():
        module = torch.export.load(path).module()

    def run(inputs: Inputs) -> Outputs:
        with torch.inference_mode():
            return {name: tensor.numpy() for name, tensor in module(**inputs).items()}

    return run
