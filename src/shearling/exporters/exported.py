"""torch.export programs: a `.pt2` file that runs where torch is, without transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from shearling.exporters.check import Outputs, Runner
from shearling.exporters.formats import Job
from shearling.exporters.graph import capture, quiet_exporters
from shearling.exporters.inputs import Inputs


def runtime() -> str:
    """What runs the file."""
    return f"PyTorch {torch.__version__}"


def write(job: Job) -> None:
    """The captured program as a file."""
    program = capture(job.typed_model(), job.inputs)
    with quiet_exporters():
        torch.export.save(program, job.path)


def open_runner(path: Path) -> Runner:
    """The file under PyTorch."""
    with quiet_exporters():
        module = torch.export.load(path).module()

    def run(inputs: Inputs) -> Outputs:
        with torch.inference_mode():
            return {name: tensor.numpy() for name, tensor in module(**inputs).items()}

    return run
