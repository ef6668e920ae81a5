"""torch.export programs: a `.pt2` file that runs with torch, without transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from shearling.exporters.check import Outputs, Runner
from shearling.exporters.formats import Job
from shearling.exporters.graph import capture, quiet_exporters
from shearling.exporters.inputs import Inputs


def runtime() -> str:
    """Name and version of the runtime."""
    return f"PyTorch {torch.__version__}"


def write(job: Job) -> None:
    """Write the captured program."""
    program = capture(job.typed_model(), job.inputs)
    with quiet_exporters():
        torch.export.save(program, job.path)


def open_runner(path: Path) -> Runner:
    """Run the file with PyTorch."""
    with quiet_exporters():
        module = torch.export.load(path).module()

    def run(inputs: Inputs) -> Outputs:
        with torch.no_grad():
            return {name: tensor.numpy() for name, tensor in module(**inputs).items()}

    return run
