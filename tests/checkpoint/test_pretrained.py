"""What a name may stand for: a directory, a GGUF file; and what cannot be pruned, told from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shearling
from shearling.checkpoint.pretrained import check_prunable, load_model, load_tokenizer
from shearling.errors import ModelError
from tiny import model_of

WIDTH, HEADS, GROUPS, FILTERS, LAYERS = 32, 4, 2, 48, 2
WORDS = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(26)), *(f"{chr(97 + i)}x" for i in range(10))]


def write_gguf(path: Path) -> dict[str, Any]:
    """A small random Llama with a byte-pair vocabulary; returns its tensors."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    head = WIDTH // HEADS
    shapes = {"token_embd": (len(WORDS), WIDTH), "output_norm": (WIDTH,), "output": (len(WORDS), WIDTH)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (WIDTH,), f"blk.{i}.ffn_norm": (WIDTH,),
            f"blk.{i}.attn_q": (WIDTH, WIDTH), f"blk.{i}.attn_k": (GROUPS * head, WIDTH),
            f"blk.{i}.attn_v": (GROUPS * head, WIDTH), f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_gate": (FILTERS, WIDTH), f"blk.{i}.ffn_up": (FILTERS, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, FILTERS),
        }  # fmt: skip
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FILTERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges([f"{chr(97 + i)} x" for i in range(10)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    tensors = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "small.gguf")
    model = load_model(str(tmp_path / "small.gguf"), device="cpu")
    down = model.model.layers[1].mlp.down_proj.weight
    assert torch.equal(down, torch.from_numpy(tensors["blk.1.ffn_down.weight"]))
    assert load_tokenizer(str(tmp_path / "small.gguf"))("axb")["input_ids"]
    batches = [{"input_ids": torch.randint(3, len(WORDS), (4, 16))} for _ in range(3)]
    pruned = shearling.prune(model, batches, flops=0.6)
    pruned.save(tmp_path / "out")
    again = shearling.load(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(again(**batches[0]).logits, pruned.model(**batches[0]).logits)


def test_a_damaged_gguf_file_is_told(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, or not")
    with pytest.raises(ModelError, match=r"Cannot load the model .*bad\.gguf"):
        load_model(str(tmp_path / "bad.gguf"), device="cpu")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match="holds a PEFT adapter; merge it"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "compressed-tensors"])
def test_packed_weights_are_refused_before_they_are_read(method: str, tmp_path: Path) -> None:
    config = model_of("bert").config
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"quantised \({method}\): prune the model that they were made from"):
        check_prunable(str(tmp_path))
