"""Metrics as fractions: accuracy, correlations, F1, perplexity, ROUGE, and ranking metrics."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shearling.engine.agreement import ranks

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"\w+")
DEPTH = 10  # maximum depth of the ranking metrics
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(gold: ArrayLike, predicted: ArrayLike) -> float:
    """Share of equal labels."""
    return float(np.mean(np.asarray(gold) == np.asarray(predicted)))


def binary_f1(gold: ArrayLike, predicted: ArrayLike) -> float:
    """F1 of class 1; 0 if neither side has it."""
    positive, chosen = np.asarray(gold) == 1, np.asarray(predicted) == 1
    total = int(positive.sum() + chosen.sum())
    return 2 * int((positive & chosen).sum()) / total if total else 0.0


def matthews(gold: ArrayLike, predicted: ArrayLike) -> float:
    """Matthews correlation for any number of classes; 0 if one side is constant."""
    classes, flat = np.unique(np.concatenate([np.asarray(gold), np.asarray(predicted)]), return_inverse=True)
    sides = np.eye(len(classes))[flat.reshape(2, -1)]  # [2, examples, classes], one-hot
    sides = sides - sides.mean(axis=1, keepdims=True)
    return _cosine(sides[0], sides[1])


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Linear correlation; 0 if one side is constant."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(x) == 0 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return _cosine(_standard(x), _standard(y))


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Rank correlation; ties get their mean rank."""
    return pearson(ranks(np.asarray(x)), ranks(np.asarray(y)))


def _standard(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred and scaled to at most 1, so that squares neither overflow nor underflow."""
    x = x / np.abs(x).max()
    x = x - x.mean()
    return x / (np.abs(x).max() or 1.0)


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / size) if size > 0 else 0.0


def perplexity(loss: float, tokens: float) -> float:
    """exp of the mean loss per token in nats; bounded to stay finite."""
    return math.exp(min(loss / tokens, 700.0))


def rouge_l(gold: str, written: str) -> float:
    """F1 of the longest common subsequence of words, ignoring case and punctuation; 0 if either is empty."""
    words, others = (_WORD.findall(text.lower()) for text in (gold, written))
    if not words or not others:
        return 0.0
    common = longest_common(words, others)
    return 2 * common / (len(words) + len(others))


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    above = [0] * (len(second) + 1)
    for word in first:
        row = [0]
        for place, other in enumerate(second):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[place]))
        above = row
    return above[-1]


# Entities are parsed as in the conlleval script.


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """The entities (type, first word, last word) of IOB1, IOB2, BIOES or BILOU tags."""
    found: set[tuple[str, int, int]] = set()
    previous, kind, first = "O", "", 0
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        prefix = {"L": "E", "U": "S"}.get(prefix, prefix)
        # A tag continues an entity only as I or E after B or I of the same type.
        if not (prefix in ("I", "E") and previous in ("B", "I") and name == kind):
            if previous != "O":
                found.add((kind, first, index - 1))
            first = index
        previous, kind = prefix, name
    return found


def entity_f1(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> tuple[float, float, float]:
    """Precision, recall and F1 of whole entities over all sentences."""
    hits = expected = proposed = 0
    for truth, guess in zip(gold, predicted, strict=True):
        true_entities, guessed = entities(truth), entities(guess)
        hits += len(true_entities & guessed)
        expected += len(true_entities)
        proposed += len(guessed)
    precision, recall = hits / max(proposed, 1), hits / max(expected, 1)
    return precision, recall, 2 * hits / max(expected + proposed, 1)


# As in the official evaluation of SQuAD 2.0, which agrees with 1.1 if an answer exists.


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def squad_em_f1(
    predicted: Sequence[str], gold: Sequence[Sequence[str]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact match and token F1 of every question against the best gold answer; no gold means unanswerable."""
    scores = [
        max(_one_answer(normalize_answer(text), truth) for truth in _normalized(answers))
        for text, answers in zip(predicted, gold, strict=True)
    ]
    em, f1 = np.array(scores, dtype=np.float64).reshape(-1, 2).T
    return em, f1


def _normalized(answers: Sequence[str]) -> list[str]:
    return [text for text in map(normalize_answer, answers) if text] or [""]


def _one_answer(text: str, truth: str) -> tuple[float, float]:
    if not text or not truth:
        return float(text == truth), float(text == truth)
    words, true_words = text.split(), truth.split()
    common = (Counter(words) & Counter(true_words)).total()
    return float(text == truth), 2 * common / (len(words) + len(true_words))


# Ranking metrics of one query. `gains` are the grades of the results in order; 0 is not relevant.


def ndcg(gains: Sequence[float], relevant: Sequence[float], depth: int) -> float:
    """Gains discounted by log2(rank + 1), relative to the ideal ranking of the `relevant` grades."""
    ideal = _discounted(sorted(relevant, reverse=True)[:depth])
    return _discounted(gains[:depth]) / ideal if ideal > 0 else 0.0


def _discounted(gains: Sequence[float]) -> float:
    return float(np.sum(np.asarray(gains, dtype=np.float64) / np.log2(np.arange(2, len(gains) + 2))))


def reciprocal_rank(gains: Sequence[float], depth: int) -> float:
    """1 / rank of the first relevant result; 0 if there is none in the first `depth`."""
    return next((1 / rank for rank, gain in enumerate(gains[:depth], start=1) if gain > 0), 0.0)


def recall(gains: Sequence[float], relevant: int, depth: int) -> float:
    """Share of the relevant passages among the first `depth`."""
    return sum(gain > 0 for gain in gains[:depth]) / relevant


def auc(positive: ArrayLike, scores: ArrayLike) -> float:
    """Probability that a relevant pair scores above an irrelevant one; ties count half."""
    wanted = np.asarray(positive, dtype=bool)
    count, others = int(wanted.sum()), int((~wanted).sum())
    above = ranks(np.asarray(scores))[wanted].sum() - count * (count + 1) / 2
    return float(above / (count * others))
