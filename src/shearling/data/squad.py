"""Extractive question answering: overlapping windows over the context, and the best span over all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from shearling.data.batches import Tokenized
from shearling.data.rows import Rows
from shearling.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

MAX_ANSWER_TOKENS = 30  # as in the reference decoders of SQuAD


@dataclass(frozen=True)
class Answer:
    """A gold answer and its start character in the context."""

    text: str
    start: int


@dataclass(frozen=True)
class Windows:
    """Windows of all examples, with the character offsets of their tokens."""

    inputs: Tokenized
    example: NDArray[np.int64]  # [windows] index of the question
    null: NDArray[np.int64]  # [windows] position of the token for "no answer": [CLS]
    context: NDArray[np.int64]  # [windows, 2] first context token, and one past the last
    offsets: list[NDArray[np.int64]]  # per window [context tokens, 2]: characters start, end

    def __len__(self) -> int:
        return len(self.example)


def read_answers(rows: Rows, name: str) -> list[list[Answer]]:
    """Gold answers, as a list of {text, answer_start}, as the Hub's {text: [...], answer_start: [...]}, or as JSON."""
    return [_answers(value, number, name, rows) for number, value in enumerate(rows.column(name), start=1)]


def _answers(value: Any, number: int, name: str, rows: Rows) -> list[Answer]:
    try:
        if isinstance(value, str):  # a csv or tsv cell
            value = json.loads(value)
        if isinstance(value, dict):
            value = [
                {"text": text, "answer_start": start}
                for text, start in zip(value["text"], value["answer_start"], strict=True)
            ]
        return [Answer(str(answer["text"]), int(answer["answer_start"])) for answer in value or ()]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"row {number} of column {name!r} of {rows.source} holds no answers ({error!r}); "
            "give a list of {text, answer_start}, empty where there is no answer"
        ) from error


def make_windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    stride: int,
) -> Windows:
    """Split every context into windows of `max_length` tokens, including the question, that overlap by `stride`."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"question answering needs a fast tokenizer for its offsets; {type(tokenizer).__name__} is not"
        )
    stride = min(stride, max_length // 3)
    room = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True) - 1
    if room < 1:
        raise DataError(f"max_length {max_length} leaves no room for a question; give a larger one")
    encoded = tokenizer(
        _shortened(questions, tokenizer, room),
        list(contexts),
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    context = np.array([_context_range(encoded, index) for index in range(len(encoded["input_ids"]))]).reshape(-1, 2)
    offsets = [
        np.array(window[first:last], dtype=np.int64).reshape(-1, 2)
        for window, (first, last) in zip(encoded["offset_mapping"], context, strict=True)
    ]
    ids = encoded["input_ids"]
    cls = tokenizer.cls_token_id
    null = np.array([window.index(cls) if cls in window else 0 for window in ids])
    inputs = Tokenized({name: encoded[name] for name in tokenizer.model_input_names if name in encoded})
    return Windows(inputs, np.array(encoded["overflow_to_sample_mapping"]), null, context, offsets)


def _shortened(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase, room: int) -> list[str]:
    """Truncate questions to `room` tokens, to leave room for the context."""
    cut = tokenizer(
        list(questions), add_special_tokens=False, truncation=True, max_length=room, return_offsets_mapping=True
    )
    whole = (len(offsets) < room for offsets in cut["offset_mapping"])
    return [
        question if fits else question[: offsets[-1][1]]
        for question, offsets, fits in zip(questions, cut["offset_mapping"], whole, strict=True)
    ]


def _context_range(encoded: BatchEncoding, window: int) -> tuple[int, int]:
    sequence = np.array([-1 if part is None else part for part in encoded.sequence_ids(window)])
    inside = np.flatnonzero(sequence == 1)
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)


def span_labels(windows: Windows, answers: Sequence[Sequence[Answer]]) -> dict[str, NDArray[np.int64]]:
    """Start and end token of the first gold answer; the null token in windows that do not contain all of it."""
    starts, ends = windows.null.copy(), windows.null.copy()
    for index, (example, offsets) in enumerate(zip(windows.example, windows.offsets, strict=True)):
        answer = next(iter(answers[example]), None)
        if answer is None or not answer.text or not len(offsets):
            continue
        last_character = answer.start + len(answer.text) - 1
        if answer.start < offsets[0, 0] or last_character >= offsets[-1, 1]:
            continue
        first = windows.context[index, 0]
        starts[index] = first + np.searchsorted(offsets[:, 0], answer.start, side="right") - 1
        ends[index] = first + np.searchsorted(offsets[:, 1], last_character, side="right")
    return {"start_positions": starts, "end_positions": ends}


def best_spans(
    start: torch.Tensor, end: torch.Tensor, context: torch.Tensor, longest: int = MAX_ANSWER_TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The span of at most `longest` tokens with the highest start + end logit in each window.

    start, end: [windows, tokens]; context: [windows, 2]. Returns score, first and last token, each [windows];
    the score is -inf if a window has no context.
    """
    position = torch.arange(start.shape[1], device=start.device)
    outside = (position < context[:, :1]) | (position >= context[:, 1:])
    start = start.masked_fill(outside, -torch.inf)
    # For every start, the best end among the next `longest` tokens: a maximum over a sliding window.
    ahead = F.pad(end.masked_fill(outside, -torch.inf), (0, longest - 1), value=-torch.inf)
    end_score, end_position = F.max_pool1d(ahead, kernel_size=longest, stride=1, return_indices=True)
    score, first = (start + end_score).max(dim=1)
    return score, first, end_position.gather(1, first[:, None])[:, 0]


def decode(logits: torch.Tensor, windows: Windows, contexts: Sequence[str], *, may_be_null: bool) -> list[str]:
    """The predicted answer of every question, "" for none; logits: [windows, tokens, 2]."""
    start, end = logits.float().unbind(dim=-1)
    score, first, last = (part.numpy() for part in best_spans(start, end, torch.from_numpy(windows.context)))
    rows = np.arange(len(windows))
    null = start.numpy()[rows, windows.null] + end.numpy()[rows, windows.null]

    lowest_null = np.full(len(contexts), np.inf, dtype=null.dtype)
    np.minimum.at(lowest_null, windows.example, null)
    # Windows by example, best span first: the first of each example is its answer.
    ranked = np.lexsort((-score, windows.example))
    example, leader = np.unique(windows.example[ranked], return_index=True)
    best = ranked[leader]

    texts = [""] * len(contexts)
    for question, window in zip(example, best, strict=True):
        if score[window] == -np.inf or (may_be_null and lowest_null[question] > score[window]):
            continue
        begin = windows.offsets[window][first[window] - windows.context[window, 0], 0]
        finish = windows.offsets[window][last[window] - windows.context[window, 0], 1]
        texts[question] = contexts[question][begin:finish]
    return texts
