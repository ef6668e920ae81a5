"""Write a tokenizer as GGUF metadata, so that llama.cpp tokenises texts equally."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.record import base_of
from shearling.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # gguf.TokenType
SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unk_token_id", "pad": "pad_token_id"}


def add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, rows: int, source: str) -> None:
    """Write tokens, their types and merges, special tokens, and the chat template.

    rows    of the embedding; rows beyond the vocabulary are written as unused tokens
    source  origin of the model; the metadata of a GGUF file is copied
    """
    original = gguf_source(source)
    if original is not None:
        _copy(writer, original)
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    facts = json.loads(backend.to_str()) if backend is not None else {"model": {"type": "none"}}
    if facts["model"]["type"] != "BPE":
        raise ModelError(f"llama.cpp reads BPE tokenizers; this one is of the type '{facts['model']['type']}'.")
    tokens, kinds = _tokens(tokenizer, facts, rows)
    if facts["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        # SentencePiece merges the pair with the highest score first; pieces are in the order of merging.
        writer.add_token_scores([-float(i) for i in range(rows)])
        writer.add_add_space_prefix(_adds_space(facts))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(facts))
        merges = facts["model"]["merges"]
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, attribute in SPECIAL.items():
        if (number := getattr(tokenizer, attribute, None)) is not None:
            getattr(writer, f"add_{name}_token_id")(int(number))
    first = tokenizer("a")["input_ids"][:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id])
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(template)


def pre_tokenizer(facts: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer."""
    first = facts.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    patterns = [s["pattern"].get("Regex", "") for s in steps if s.get("type") == "Split"]
    if any(r"\p{N}{1,3}" in pattern for pattern in patterns):
        return "llama-bpe"
    if any(re.search(r"\|\\p\{N\}\|", pattern) for pattern in patterns):
        return "qwen2"
    kinds = [s.get("type") for s in steps]
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    raise ModelError(
        f"The tokenizer splits text by {', '.join(str(k) for k in kinds)}, and no pre-tokenizer matches it in "
        "llama.cpp."
    )


def gguf_source(source: str) -> Path | None:
    """The GGUF file that a model is, or was pruned from, if it exists."""
    path = Path(source)
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    base = base_of(path)
    return Path(base) if base is not None and base.endswith(".gguf") else None


def _copy(writer: Any, path: Path) -> None:
    import gguf

    for name, field in gguf.GGUFReader(str(path)).fields.items():
        if name.startswith("tokenizer."):
            inside = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inside)


def _tokens(tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Tokens and their types for every row of the embedding."""
    added = {entry["id"]: entry for entry in facts.get("added_tokens", [])}
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens, kinds = [], []
    for number in range(rows):
        token = known.get(number)
        tokens.append(f"[PAD{number}]" if token is None else token)
        if token is None:
            kinds.append(UNUSED)
        elif number in added:
            kinds.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            kinds.append(BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else NORMAL)
    return tokens, kinds


def _adds_space(facts: dict[str, Any]) -> bool:
    """Whether the normalizer or Metaspace prepends a space to the text."""
    said = json.dumps([facts.get("normalizer"), facts.get("pre_tokenizer")])
    return '"Prepend"' in said or '"prepend_scheme": "always"' in said or '"prepend_scheme": "first"' in said
