"""ONNX: written by torch, quantised and run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.errors import InputError, ModelError
from shearling.export.check import Outputs, Runner
from shearling.export.graph import axes, capture, hushed
from shearling.export.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEEDED = ("onnx", "onnxscript", "onnxruntime")


def require() -> None:
    """Complain before the work where a package is missing."""
    import importlib.util

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"ONNX export needs {', '.join(missing)}: pip install 'shearling[export]'.")


def write(model: PreTrainedModel, inputs: Inputs, outputs: list[str], path: Path, *, precision: str) -> None:
    """The model as an ONNX file with varying batch size and length; weights beyond 2 GB lie beside it."""
    import torch

    program = capture(model, inputs)
    with hushed():
        try:
            result = torch.onnx.export(
                program, dynamo=True, input_names=list(inputs), output_names=outputs, dynamic_shapes=axes(inputs),
                verbose=False,
            )  # fmt: skip
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{type(model).__name__} cannot be written as ONNX: {reason}") from error
        if result is None:
            raise ModelError(f"{type(model).__name__} cannot be written as ONNX: torch gave no program.")
        _without_traces(result.model)
        if precision != "int8":
            result.save(str(path))
            return
        plain = path.with_name("float32.onnx")
        result.save(str(plain))
        quantise(plain, path)
        for part in path.parent.glob("float32.onnx*"):
            part.unlink()


def _without_traces(model: Any) -> None:
    """Take out the exporter's remarks: a stack trace at every node, with the paths of the machine it ran on."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        graph.metadata_props.clear()
    model.metadata_props.clear()


def quantise(source: Path, target: Path) -> None:
    """Weights as int8 with a scale per column, activations as int8 on the fly (dynamic quantisation)."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    del model.graph.value_info[:]  # shapes torch has noted in its own way; the quantiser works them out again
    with hushed():
        # 7 bits a weight: with 8, the integer products of processors without VNNI overflow.
        quantize_dynamic(model, str(target), weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)


def open_runner(path: Path) -> Runner:
    """The file under ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    takes = {i.name for i in session.get_inputs()}

    def run(inputs: Inputs) -> Outputs:
        feed: dict[str, Any] = {name: t.numpy() for name, t in inputs.items() if name in takes}
        return dict(zip(names, session.run(None, feed), strict=True))

    return run
