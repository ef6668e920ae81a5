"""GGUF files: the sizes and numbers llama.cpp reads, against PyTorch; in llama.cpp itself where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shearling.errors import ModelError
from shearling.exporters import gguf as kind
from shearling.exporters.check import TOLERANCE
from shearling.exporters.formats import Job
from shearling.exporters.gguf_run import LlamaCpp, TorchEngine, has_llama_cpp
from shearling.exporters.gguf_tokenizer import pre_tokenizer
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of

gguf = pytest.importorskip("gguf", reason="needs shearling[gguf]")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the")]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 272,
}  # fmt: skip
ENGINES = [
    TorchEngine,
    pytest.param(LlamaCpp, marks=pytest.mark.skipif(not has_llama_cpp(), reason="no llama.cpp here")),
]


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<end>", *LETTERS, *("".join(pair) for pair in MERGES)]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, MERGES))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", bos_token="<end>")


def language_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **SIZES | {"sliding_window": None} | changes)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def uneven(model: Any) -> Any:
    """One layer with a group and 5 filters, one without filters, one without heads."""
    kept = [torch.arange(s.units) for s in structure_of(model).sublayers]
    kept[0], kept[1], kept[3], kept[4] = torch.tensor([1]), torch.tensor([0, 7, 8, 50, 69]), kept[3][:0], kept[4][:0]
    return shrink(model, kept)


def written(model: Any, path: Path, precision: str = "float16") -> Path:
    assert kind.unsuited(model) is None
    kind.write(Job(model, {}, ["logits"], path, precision, tokenizer=tokenizer(), source="nowhere"))
    return path


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["float16", "q8_0"])  # q4_0: test_rounded_layers.py
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                }
            },
        ),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", ["even", "uneven"])
def test_the_file_gives_the_logits_of_the_model(
    tmp_path: Path, family: str, changes: dict[str, Any], shape: str, precision: str, engine: Any
) -> None:
    model = language_model(family, **changes)
    model = uneven(model) if shape == "uneven" else model
    ids = torch.randint(0, SIZES["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0].numpy()
    found = engine(written(model, tmp_path / "model.gguf", precision)).logits(ids[0].tolist())
    error = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
    assert error < {**TOLERANCE, "float16": 5e-3}[precision]


def test_sizes_of_each_layer(tmp_path: Path) -> None:
    file = gguf.GGUFReader(written(uneven(language_model("llama")), tmp_path / "model.gguf", "q8_0"))
    values = {name: field.contents() for name, field in file.fields.items()}
    assert values["general.architecture"] == "deci"
    # 5 filters, none and 70: whole blocks of 32; none would make llama.cpp leave out the attention too
    assert values["deci.feed_forward_length"] == [32, 32, 96]
    assert values["deci.attention.head_count"] == [2, 4, 0]
    assert values["deci.attention.head_count_kv"] == [1, 2, 0]
    shapes = {tensor.name: tensor.shape.tolist() for tensor in file.tensors}
    assert shapes["blk.0.ffn_down.weight"] == [32, 64]
    assert "blk.2.attn_q.weight" not in shapes


def test_even_layers_keep_their_own_architecture(tmp_path: Path) -> None:
    for family, name in kind.ARCHITECTURES.items():
        file = gguf.GGUFReader(written(language_model(family), tmp_path / f"{family}.gguf"))
        assert file.fields["general.architecture"].contents() == name
        assert file.fields[f"{name}.feed_forward_length"].contents() == SIZES["intermediate_size"]


@pytest.mark.parametrize("text", ["the cat", "then the other\n\nthe é 12 漢", "  the"])
def test_llama_cpp_cuts_texts_like_the_tokenizer(tmp_path: Path, text: str) -> None:
    if not has_llama_cpp():
        pytest.skip("no llama.cpp here")
    engine = LlamaCpp(written(language_model("llama"), tmp_path / "model.gguf"))
    assert engine.tokenize(text) == tokenizer()(text)["input_ids"]


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    fields = gguf.GGUFReader(written(language_model("llama"), tmp_path / "model.gguf")).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert len(tokens) == len(types) == SIZES["vocab_size"]
    known = len(tokenizer())
    assert types[:2] == [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL]
    assert set(types[known:]) == {gguf.TokenType.UNUSED}
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in MERGES]


def test_what_is_refused() -> None:
    assert "gpt2" in str(kind.unsuited(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=48))))
    assert "window" in str(kind.unsuited(language_model("mistral", sliding_window=16)))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    assert "yarn" in str(kind.unsuited(language_model("llama", rope_parameters=yarn)))
    with pytest.raises(ModelError, match="no pre-tokenizer"):
        pre_tokenizer({"pre_tokenizer": {"type": "Whitespace"}})


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], "smollm"),
        ([{"type": "ByteLevel"}], "gpt-2"),
        ([{"type": "Split", "pattern": {"Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?"}}], "llama-bpe"),
        ([{"type": "Split", "pattern": {"Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?"}}], "qwen2"),
    ],
)
def test_pre_tokenizers(steps: list[dict[str, Any]], name: str) -> None:
    assert pre_tokenizer({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}) == name
