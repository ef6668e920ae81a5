"""Sources and targets for encoder-decoders: columns, prefixes, decoder inputs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shearling.data.batches import Tensors, Tokenized
from shearling.data.columns import read_texts
from shearling.data.languages import languages_of, spoken
from shearling.data.rows import Rows
from shearling.engine.decoder import shifted, target_of, write
from shearling.engine.hooks import device_of
from shearling.errors import DataError, ModelError
from shearling.schema.rules import shown

if TYPE_CHECKING:
    from shearling.data.encoder import Encoder

_log = logging.getLogger(__name__)
_SOURCES = ("source", "src", "article", "document", "dialogue", "input", "inputs", "prompt", "question", "text")
_TARGETS = ("target", "targets", "tgt", "summary", "highlights", "output", "outputs", "completion", "response",
            "answer", "labels", "label")  # fmt: skip
_SUMMARIES = ("summary", "highlights", "abstract", "headline")
_KEYS = ("id", "idx", "index", "key", "guid", "uid", "uuid")  # of a row, often texts
_LANGUAGE = re.compile(r"[a-z]{2,3}([_-][A-Za-z]{2,4})?")
_PLAIN = "translation"  # a column of {language: text}


def find_pair(rows: Rows, text: Sequence[str] | None = None, label: str | None = None) -> tuple[str, str | None]:
    """The columns of sources and targets; the latter is None if there are no targets.

    In this order: given names (`--text-columns source,target`, or `--label-column target`), well-known names, two
    languages, the only two text columns. Keys of rows do not count.
    """
    if text:
        given = [*text, *([label] if label else [])]
        for name in given:
            rows.column(name)  # raises, naming the columns there are
        if len(given) > 2:
            raise DataError(f"task seq2seq takes a source and a target, {len(given)} columns were given: {given}")
        return given[0], given[1] if len(given) == 2 else None
    if label:
        rows.column(label)
    every = [name for name in rows.names if isinstance(rows.column(name)[0], str) and name != label]
    strings = [name for name in every if name.lower() not in _KEYS]
    source = next((name for name in _SOURCES if name in strings), None)
    target = label or next((name for name in _TARGETS if name in strings and name != source), None)
    if target is None:
        _check_no_target(rows)
    if source is None and target is not None:
        source = next((name for name in strings if name != target), None)
    languages = [name for name in (every if len(strings) < 2 else strings) if _LANGUAGE.fullmatch(name)]
    if source is None and len(languages) == 2:
        source, target = languages[0], languages[1]
    if source is None and len(strings) in (1, 2):
        source = strings[0]
    if source is not None and target is None and len(strings) == 2:
        target = next(name for name in strings if name != source)
    if source is None:
        raise DataError(
            f"task seq2seq looks for a source and a target, and {rows.source} has {list(rows.names)}; name them: "
            "--text-columns SOURCE,TARGET, or --text-columns SOURCE alone"
        )
    return source, target


def _check_no_target(rows: Rows) -> None:
    """Raise if a column that is named like a target holds no text; classes may be numbers."""
    for name in _TARGETS:
        if name in rows.names and name not in ("labels", "label"):
            raise DataError(
                f"row 1 of column {name!r} of {rows.source} holds {shown(rows.column(name)[0])}; targets must be "
                "texts. Make them texts, or name the source alone: --text-columns SOURCE"
            )


def flattened(rows: Rows) -> Rows:
    """Split a column of {language: text} into one column per language."""
    if _PLAIN not in rows.names or not isinstance(rows.column(_PLAIN)[0], Mapping):
        return rows
    pairs = rows.column(_PLAIN)
    names = [name for name in pairs[0] if all(isinstance(pair.get(name), str) for pair in pairs)]
    return Rows({name: [pair[name] for pair in pairs] for name in names}, source=rows.source)


def prefix_of(config: Any, source: str, target: str | None) -> str:
    """The prefix of sources in the model's configuration (T5), chosen by the names of the columns."""
    tasks = getattr(config, "task_specific_params", None) or {}
    prefixes = {name: str(params["prefix"]) for name, params in tasks.items() if (params or {}).get("prefix")}
    if target in _SUMMARIES and "summarization" in prefixes:
        return prefixes["summarization"]
    by_language = prefixes.get(f"translation_{source}_to_{target}")
    if by_language is not None:
        return by_language
    return next(iter(prefixes.values())) if len(prefixes) == 1 else ""


def reading_of(
    rows: Rows, config: Any, text: Sequence[str] | None, label: str | None, prefix: str | None = None
) -> str:
    """The columns and the prefix that are used, in words."""
    source, target = find_pair(flattened(rows), text, label)
    used = prefix_of(config, source, target) if prefix is None else prefix
    first = f"sources are the column {source!r}" + (f" with the prefix {used!r}" if used else "")
    return f"{first}, targets the column {target!r}" if target else first


def tokenize_pairs(encoder: Encoder, rows: Rows) -> Tokenized:
    """Encoder inputs of sources, decoder inputs of targets, and labels if wanted."""
    rows = flattened(rows)
    source, target = find_pair(rows, encoder.text_columns, encoder.label_column)
    prefix = prefix_of(encoder.config, source, target) if encoder.prefix is None else encoder.prefix
    texts = [text if text.startswith(prefix) else prefix + text for text in read_texts(rows, source)]
    same = target in _SUMMARIES
    languages = languages_of(encoder.tokenizer, encoder.model, source, target, same=same)
    with spoken(encoder.tokenizer, encoder.model, languages):
        return _tokenized(encoder, rows, texts, source, target)


def _tokenized(encoder: Encoder, rows: Rows, texts: list[str], source: str, target: str | None) -> Tokenized:
    """Encoder inputs of these sources, and decoder inputs and labels of the target column."""
    tokens = dict(encoder.embed(texts).tokens)
    if target is None:
        if encoder.labels == "require":
            raise DataError(f"{rows.source} has no targets beside {source!r}; name them with --label-column")
        if encoder.labels == "ignore":
            return Tokenized(tokens)  # the pipeline generates targets for the examples that it draws
        both = [target_of(encoder.model, row) for row in _written(encoder, tokens)]
        read, wanted = [pair[0].tolist() for pair in both], [pair[1].tolist() for pair in both]
    else:
        wanted = _target_tokens(encoder, read_texts(rows, target))
        read = [shifted(encoder.model, torch.tensor([ids]))[0].tolist() for ids in wanted]
    tokens |= {"decoder_input_ids": read, "decoder_attention_mask": [[1] * len(ids) for ids in read]}
    return Tokenized(tokens if encoder.labels == "ignore" else tokens | {"labels": wanted})


def _target_tokens(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    tokenizer = encoder.tokenizer
    found = tokenizer(text_target=texts, truncation=True, max_length=encoder.max_length)["input_ids"]
    if not all(found):
        raise DataError("some targets are empty, and this tokenizer adds no token of its own to them; leave them out")
    return list(found)


def _written(encoder: Encoder, tokens: dict[str, Any]) -> list[torch.Tensor]:
    """The target that the model generates for each source."""
    if encoder.model is None:
        raise ModelError("targets are missing, and there is no model to generate them")
    _log.info("the data has no targets: the dense model generates them greedily")
    batches = encoder.batches(Tokenized(tokens), 16)
    rows: list[torch.Tensor] = []
    for batch in batches:
        here: Tensors = {name: tensor.to(device_of(encoder.model)) for name, tensor in batch.items()}
        rows += list(write(encoder.model, here).cpu())
    ordered: dict[int, torch.Tensor] = dict(zip(batches.order.tolist(), rows, strict=True))
    return [ordered[number] for number in range(len(rows))]
