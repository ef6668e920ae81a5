"""The encoder of a task: turns rows into model inputs with labels, for each kind of task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from shearling.data.batches import Batches, Tokenized, cut, padded
from shearling.data.columns import (
    find_label_column,
    find_text_columns,
    read_classes,
    read_scores,
    read_tags,
    read_texts,
    require_label_column,
)
from shearling.data.lm import make_blocks
from shearling.data.retrieval import candidates, search_texts
from shearling.data.rows import Rows
from shearling.data.seq2seq import tokenize_pairs
from shearling.data.squad import Windows, make_windows, read_answers, span_labels
from shearling.data.tasks import Kind, Task, find_task, several_labels
from shearling.errors import DataError, InputError, ModelError
from shearling.models.pooling import GUESS, Pooling
from shearling.models.positions import positions_of
from shearling.sample.batch import IGNORED
from shearling.schema.rules import shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from typing_extensions import Unpack

Labels = Literal["require", "optional", "ignore"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoder:
    """Turns rows into model inputs, with the tokenizer, task and configuration of a model.

    pooling  of an embedding model: its prompts and maximum length
    model    an encoder-decoder, which shifts labels, and generates targets where there are none
    prefix   of an encoder-decoder's sources; None takes that of its configuration
    """

    tokenizer: PreTrainedTokenizerBase
    task: Task
    config: PretrainedConfig
    max_length: int
    labels: Labels = "require"
    text_columns: Sequence[str] | None = None
    label_column: str | None = None
    seed: int = 0
    pooling: Pooling = GUESS
    model: Any = None
    prefix: str | None = None

    @property
    def pad_id(self) -> int:
        """The padding token; any token will do if the model has none, since it is masked."""
        candidates = (
            self.tokenizer.pad_token_id,
            getattr(self.config, "pad_token_id", None),
            self.tokenizer.eos_token_id,
        )
        return next((int(token) for token in candidates if token is not None), 0)

    def texts(self, rows: Rows) -> list[list[str]]:
        """The texts, column by column."""
        return [read_texts(rows, name) for name in find_text_columns(rows, self.task, self.text_columns)]

    def windows(self, rows: Rows) -> tuple[list[str], Windows]:
        """The contexts of questions, and their windows."""
        questions, contexts = self.texts(rows)
        length, stride = self.max_length, self.task.stride
        return contexts, make_windows(questions, contexts, self.tokenizer, max_length=length, stride=stride)

    def label_name(self, rows: Rows) -> str | None:
        """The label column to read, if any."""
        if self.labels == "ignore":
            return None
        if several_labels(self.config):
            if self.labels == "optional":
                return None
            raise ModelError("this model gives several labels per example, and no task here reads those from rows")
        find = require_label_column if self.labels == "require" else find_label_column
        return find(rows, self.task, self.label_column)

    def tokenize(self, rows: Rows) -> Tokenized:
        """Model inputs and labels: one per row, window of a long context, or block of text."""
        return self._without_unknown_inputs(_TOKENIZERS[self.task.kind](self, rows))

    def embed(self, texts: Sequence[str], use: Literal["query", "document"] | None = None) -> Tokenized:
        """Tokenise single texts with the model's prompt."""
        prompt = self.pooling.prompt(use)
        return self._without_unknown_inputs(_tokenize_texts(self, [prompt + text for text in texts]))

    def batches(self, examples: Tokenized, batch_size: int, *, bucket: bool = True) -> Batches:
        """Pad and stack; `bucket` groups examples of similar length, the longest first."""
        lengths = [len(ids) for ids in examples.tokens["input_ids"]] if bucket else None
        return cut(examples, batch_size, lengths, lambda some: padded(some, self.pad_id))

    def _without_unknown_inputs(self, examples: Tokenized) -> Tokenized:
        """Drop token types if the model has fewer than two type embeddings."""
        if getattr(self.config, "type_vocab_size", 0) >= 2:
            return examples
        return Tokenized({n: t for n, t in examples.tokens.items() if n != "token_type_ids"}, examples.values)


class EncoderOptions(TypedDict, total=False):
    """Options for reading rows: the fields of `Encoder` that have defaults."""

    labels: Labels
    text_columns: Sequence[str] | None
    label_column: str | None
    seed: int
    pooling: Pooling
    model: Any
    prefix: str | None


def make_encoder(
    tokenizer: PreTrainedTokenizerBase,
    task: Task | str,
    config: PretrainedConfig,
    *,
    max_length: int | None = None,
    **options: Unpack[EncoderOptions],
) -> Encoder:
    """Create an encoder; checks `max_length` against the model, and fills in the task's default."""
    from shearling.data.media import MediaEncoder, medium_of  # imports this module

    task = find_task(task)
    if medium_of(tokenizer):
        return MediaEncoder(tokenizer, task, config, 0, **options)
    limit = min(positions_of(config) or tokenizer.model_max_length, tokenizer.model_max_length)
    if max_length is not None and not 4 <= max_length <= limit:
        raise InputError(f"max_length {max_length} was asked for; this model takes 4 to {limit} tokens")
    usual = min(task.max_length, limit, options.get("pooling", GUESS).max_length or limit)
    return Encoder(tokenizer, task, config, usual if max_length is None else max_length, **options)


def _sequences(encoder: Encoder, rows: Rows) -> Tokenized:
    """Texts or pairs, each with a class or a score."""
    examples = _tokenize_texts(encoder, *encoder.texts(rows))
    name = encoder.label_name(rows)
    if name is None:
        return examples
    if encoder.task.kind == "regression":
        return Tokenized(examples.tokens, {"labels": read_scores(rows, name)})
    return Tokenized(examples.tokens, {"labels": read_classes(rows, name, encoder.task, encoder.config)})


def _reranked(encoder: Encoder, rows: Rows) -> Tokenized:
    """Pairs of a query and a passage, with the relevance as label."""
    pairs = candidates(rows, encoder.task, encoder.text_columns, encoder.label_column)
    examples = _tokenize_texts(encoder, *(read_texts(pairs, name) for name in ("query", "passage")))
    if encoder.label_name(rows) is None:
        return examples
    return Tokenized(examples.tokens, {"labels": read_scores(pairs, "relevance")})


def _embedded(encoder: Encoder, rows: Rows) -> Tokenized:
    """Single texts, the first column of pairs before the second, without labels."""
    return encoder.embed([text for column in encoder.texts(rows) for text in column])


def _searched(encoder: Encoder, rows: Rows) -> Tokenized:
    """All queries, then all passages, each with its prompt."""
    queries, passages = search_texts(rows, encoder.task, encoder.text_columns)
    first, second = encoder.embed(queries, "query").tokens, encoder.embed(passages, "document").tokens
    return Tokenized({name: [*first[name], *second[name]] for name in first})


def _tokenize_texts(encoder: Encoder, *columns: list[str]) -> Tokenized:
    tokenizer = encoder.tokenizer
    encoded = tokenizer(*columns, truncation=True, max_length=encoder.max_length)
    tokens = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
    _report_truncated(encoder, columns, tokens["input_ids"])
    return Tokenized(_never_empty(tokens, tokenizer))


def _report_truncated(encoder: Encoder, columns: Sequence[Sequence[str]], ids: Sequence[Sequence[int]]) -> None:
    full = [index for index, tokens in enumerate(ids) if len(tokens) == encoder.max_length]
    if not full:
        return
    whole = encoder.tokenizer(*([column[i] for i in full] for column in columns), verbose=False)["input_ids"]
    count = sum(len(tokens) > encoder.max_length for tokens in whole)
    if count:
        _log.warning("%d of %d texts were cut to %d tokens", count, len(ids), encoder.max_length)


def _never_empty(tokens: dict[str, list[list[int]]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Give empty texts one token to attend to, if the tokenizer adds no special tokens."""
    candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    alone = next((token for token in candidates if token is not None), 0)
    fill = {"input_ids": alone, "attention_mask": 1}
    return {name: [ids or [fill.get(name, 0)] for ids in lists] for name, lists in tokens.items()}


def _tagged(encoder: Encoder, rows: Rows) -> Tokenized:
    """Words with tags; the first token of a word carries its tag."""
    tokenizer, words = encoder.tokenizer, _read_words(encoder, rows)
    if not tokenizer.is_fast:
        raise ModelError(f"token classification needs a fast tokenizer; {type(tokenizer).__name__} is not")
    try:
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=encoder.max_length)
    except (AssertionError, ValueError) as error:
        raise ModelError(
            f"the tokenizer does not take split words ({error}); load it with add_prefix_space=True"
        ) from error
    tokens = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
    name = encoder.label_name(rows)
    if name is not None:
        tags = read_tags(rows, name, encoder.task, encoder.config)
        odd = next((i for i, pair in enumerate(zip(words, tags, strict=True)) if len(pair[0]) != len(pair[1])), None)
        if odd is not None:
            raise DataError(f"row {odd + 1} of {rows.source} has {len(words[odd])} words, but {len(tags[odd])} tags")
        tokens["labels"] = [_spread(encoded.word_ids(index), tags[index]) for index in range(len(words))]
    return Tokenized(tokens)


def _read_words(encoder: Encoder, rows: Rows) -> list[list[str]]:
    name, *_ = find_text_columns(rows, encoder.task, encoder.text_columns)
    for number, words in enumerate(rows.column(name), start=1):
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise DataError(
                f"row {number} of column {name!r} of {rows.source} holds {shown(words)}; give a list of words"
            )
    return [list(words) for words in rows.column(name)]


def _spread(words: Sequence[int | None], tags: Any) -> list[int]:
    """One label per token: the tag at the first token of each word."""
    previous = [None, *words[:-1]]
    return [
        IGNORED if word is None or word == before else int(tags[word])
        for word, before in zip(words, previous, strict=True)
    ]


def _answered(encoder: Encoder, rows: Rows) -> Tokenized:
    """Windows of the contexts, with start and end tokens of the answer."""
    _, windows = encoder.windows(rows)
    name = encoder.label_name(rows)
    values = {} if name is None else span_labels(windows, read_answers(rows, name))
    return Tokenized(windows.inputs.tokens, values)


_TOKENIZERS: dict[Kind, Callable[[Encoder, Rows], Tokenized]] = {
    "classification": _sequences,
    "regression": _sequences,
    "token-classification": _tagged,
    "question-answering": _answered,
    "embedding": _embedded,
    "knn": _embedded,
    "retrieval": _searched,
    "rerank": _reranked,
    "lm": make_blocks,
    "seq2seq": tokenize_pairs,
}
