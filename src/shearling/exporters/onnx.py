"""ONNX: written by torch, quantised and run with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shearling.errors import ModelError
from shearling.exporters.check import Outputs, Runner
from shearling.exporters.formats import Job
from shearling.exporters.graph import axes, capture, quiet_exporters
from shearling.exporters.inputs import Inputs


def runtime() -> str:
    """Name and version of the runtime."""
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


def write(job: Job) -> None:
    """Write an ONNX file with dynamic batch size and length; weights over 2 GB go to a file beside it."""
    import torch

    name = type(job.model).__name__
    with plain_attention(job.typed_model()) as model:
        program = capture(model, job.inputs)
    with quiet_exporters():
        try:
            result = torch.onnx.export(
                program, dynamo=True, input_names=list(job.inputs), output_names=job.outputs,
                dynamic_shapes=axes(job.inputs), verbose=False,
            )  # fmt: skip
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{name} cannot be written as ONNX: {reason}") from error
        if result is None:
            raise ModelError(f"{name} cannot be written as ONNX: torch returned no program.")
        _without_traces(result.model)
        if not job.precision.startswith("int8"):
            result.save(str(job.path))
            return
        plain = job.path.with_name("float32.onnx")
        result.save(str(plain))
        if job.precision == "int8-static":
            quantise_static(plain, job.path, job.calibration)
        else:
            quantise_dynamic(plain, job.path)
        for file in job.path.parent.glob("float32.onnx*"):
            file.unlink()


@contextmanager
def plain_attention(model: Any) -> Iterator[Any]:
    """Use eager attention; restored afterwards.

    torch's fused attention adds twelve nodes per layer in ONNX, mostly shape computations, which for short texts take
    longer than the attention itself.
    """
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "set_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = "eager"
        yield model
    finally:
        for key, config in configs.items():  # outer configurations first, since they also set nested ones
            config._attn_implementation = before[key]


def _without_traces(model: Any) -> None:
    """Remove the exporter's stack traces, which contain paths of this machine."""
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


def quantise_dynamic(source: Path, target: Path) -> None:
    """int8 weights with a scale per column; int8 activations with ranges per batch."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet_exporters():
        # 7 bits per weight: with 8, integer products overflow on processors without VNNI.
        quantize_dynamic(
            _without_shapes(source), str(target), weight_type=QuantType.QInt8, per_channel=True, reduce_range=True
        )


def quantise_static(source: Path, target: Path, calibration: Sequence[Inputs]) -> None:
    """int8 weights with a scale per column; int8 activations with ranges from calibration."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    with quiet_exporters():
        quantize_static(
            _without_shapes(source), str(target), _Reader(calibration), quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"], per_channel=True, reduce_range=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            # attention products stay in float32: the softmax loses too much in 8 bits
            extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip


def _without_shapes(source: Path) -> Any:
    """The graph without torch's shape annotations; the quantiser infers them again."""
    import onnx

    model = onnx.load(str(source))
    del model.graph.value_info[:]
    return model


class _Reader:
    """Batches with the interface of ONNX Runtime's calibrators: one by one, then None."""

    def __init__(self, batches: Sequence[Inputs]) -> None:
        self.batches = batches
        self.rewind()

    def rewind(self) -> None:
        self.left = iter(self.batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.left, None)
        return None if batch is None else {name: tensor.numpy() for name, tensor in batch.items()}

    def set_range(self, start_index: int, end_index: int) -> None:
        self.left = iter(self.batches[start_index:end_index])

    def __len__(self) -> int:
        return len(self.batches)


def open_runner(path: Path) -> Runner:
    """Run the file with ONNX Runtime on the CPU, with PyTorch's number of threads."""
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    takes = {i.name for i in session.get_inputs()}

    def run(inputs: Inputs) -> Outputs:
        feed: dict[str, Any] = {name: t.numpy() for name, t in inputs.items() if name in takes}
        return dict(zip(names, session.run(None, feed), strict=True))

    return run
