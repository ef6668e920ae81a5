"""A model as a file that runs without transformers.

inputs.py     inputs to trace and to check with: from data, or made from the tokenizer
graph.py      the model with named tensors in and out, captured once for every format
onnx.py       ONNX: written, quantised, run by ONNX Runtime
exported.py   torch.export programs: written, run by PyTorch
check.py      the file against PyTorch
job.py        all of it: a model directory becomes a checked file, or nothing
"""

from shearling.export.job import FORMATS, Exported, export_model

__all__ = ["FORMATS", "Exported", "export_model"]
