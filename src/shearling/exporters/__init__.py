"""Export models to files that run without transformers.

inputs.py     example inputs for tracing and checking, from data or from the tokenizer
graph.py      the model with named input and output tensors, captured by torch.export
formats.py    the input of a format's writer
table.py      the table of formats
onnx.py       ONNX, quantisation, ONNX Runtime
exported.py   torch.export programs
openvino.py   OpenVINO, converted from ONNX
ctranslate2.py  encoders with equal layers, by CTranslate2's converter
gguf.py       GGUF for llama.cpp; gguf_tokenizer.py writes its tokenizer, gguf_run.py runs it
rounding.py   GPTQ for one matrix; rounded_layers.py applies it to all layers
check.py      compares the file with PyTorch
place.py      output paths
result.py     the result of an export
"""
