"""A model as a file that runs without transformers.

inputs.py     inputs to trace and to check with: from data, or made from the tokenizer
graph.py      the model with named tensors in and out, captured once for every format
onnx.py       ONNX: written, quantised, run by ONNX Runtime
exported.py   torch.export programs: written, run by PyTorch
check.py      the file against PyTorch
result.py     what was written, and how it compares
"""
