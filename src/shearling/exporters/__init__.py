"""A model as a file that runs without transformers.

inputs.py     inputs to trace and to check with: from data, or made from the tokenizer
graph.py      the model with named tensors in and out, captured once for every format that needs it
formats.py    the job that a format is given
table.py      the formats: a row each, and which of them suit a model
onnx.py       ONNX: written, quantised, run by ONNX Runtime
exported.py   torch.export programs: written, run by PyTorch
openvino.py   OpenVINO, by way of ONNX
ctranslate2.py  encoders with even layers, by CTranslate2's converter
gguf.py       GGUF for llama.cpp; gguf_tokenizer.py its tokenizer, gguf_run.py runs it
check.py      the file against PyTorch
place.py      where it goes
result.py     what was written, and how it compares
"""
