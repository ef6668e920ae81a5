"""Tiny tokenizers and models, built on the spot: no network, no files."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, GPT2Config, PreTrainedTokenizerFast, T5Config

from shearling.evaluation.exam import make_exam

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "the a of in good bad film was is not who where when paris river city anna lives and , . ? ' ##s ##ing go walk"
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *WORDS.split(), *"0123456789"])}


def bert_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """WordPiece with [CLS] a [SEP] b [SEP]."""
    tokenizer = _word_pieces()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])],
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokens = {f"{name}_token": token for name, token in names.items()}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **tokens, **options)


def gpt_tokenizer() -> PreTrainedTokenizerFast:
    """The same pieces, with no special token but the end of text."""
    return PreTrainedTokenizerFast(tokenizer_object=_word_pieces(), eos_token="[SEP]", unk_token="[UNK]")


def _word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def bert_config(**options: Any) -> BertConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=64, **(sizes | options))


def gpt_config(**options: Any) -> GPT2Config:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ends = {"bos_token_id": None, "eos_token_id": VOCABULARY["[SEP]"]}
    return GPT2Config(vocab_size=len(VOCABULARY), **(sizes | ends | options))


def build(model_class: type[Any], config: Any, seed: int = 0) -> Any:
    """A random model whose outputs differ clearly from example to example."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.normal_(std=0.3)
    return model


def evaluate(model: Any, tokenizer: Any, rows: Any, task: Any = None, **given: Any) -> Any:
    """An exam made for one model, and taken by it."""
    taking = {name: given.pop(name) for name in ("device", "progress", "compile") if name in given}
    return make_exam(model, tokenizer, rows, task, **given).take(model, **taking)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """The same pieces with an end after each text, as T5's has."""
    tokenizer = _word_pieces()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", VOCABULARY["[SEP]"])]
    )
    names = {"eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


def t5_config(**options: Any) -> T5Config:
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2}
    ends = {"pad_token_id": 0, "eos_token_id": VOCABULARY["[SEP]"], "decoder_start_token_id": 0}
    return T5Config(vocab_size=len(VOCABULARY), **(sizes | ends | options))
