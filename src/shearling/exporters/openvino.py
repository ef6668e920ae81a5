"""OpenVINO: `.xml` with the weights in `.bin`, converted from ONNX."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from shearling.exporters import onnx
from shearling.exporters.check import Outputs, Runner
from shearling.exporters.formats import Job
from shearling.exporters.graph import quiet_exporters
from shearling.exporters.inputs import Inputs


def runtime() -> str:
    """Name and version of the runtime."""
    import openvino

    return f"OpenVINO {openvino.__version__.partition('-')[0]}"


def write(job: Job) -> None:
    """Convert from a temporary ONNX file."""
    import openvino

    between = job.path.with_name("between.onnx")
    precision = "float32" if job.precision == "float16" else job.precision  # weights are compressed below
    onnx.write(dataclasses.replace(job, path=between, precision=precision))
    with quiet_exporters():
        openvino.save_model(openvino.convert_model(between), job.path, compress_to_fp16=job.precision == "float16")
    for file in between.parent.glob("between.onnx*"):
        file.unlink()


def open_runner(path: Path) -> Runner:
    """Run the file on the CPU, tuned for latency; float32 unless the file is int8."""
    import openvino

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", options)
    takes = {port.any_name for port in compiled.inputs}
    gives = [port.any_name for port in compiled.outputs]

    def run(inputs: Inputs) -> Outputs:
        feed: dict[str, Any] = {name: t.numpy() for name, t in inputs.items() if name in takes}
        found = compiled(feed)
        return {name: found[number] for number, name in enumerate(gives)}

    return run
