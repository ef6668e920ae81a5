"""The metrics of the tasks, as fractions: accuracy, correlations, F1, perplexity, ROUGE, and of rankings."""

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
DEPTH = 10  # no metric of a ranking looks further down
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(gold: ArrayLike, predicted: ArrayLike) -> float:
    """The share of equal labels."""
    return float(np.mean(np.asarray(gold) == np.asarray(predicted)))


def binary_f1(gold: ArrayLike, predicted: ArrayLike) -> float:
    """F1 of class 1; 0 where neither side has it."""
    positive, chosen = np.asarray(gold) == 1, np.asarray(predicted) == 1
    total = int(positive.sum() + chosen.sum())
    return 2 * int((positive & chosen).sum()) / total if total else 0.0


def matthews(gold: ArrayLike, predicted: ArrayLike) -> float:
    """Matthews correlation, for any number of classes; 0 where one side is constant."""
    classes, flat = np.unique(np.concatenate([np.asarray(gold), np.asarray(predicted)]), return_inverse=True)
    sides = np.eye(len(classes))[flat.reshape(2, -1)]  # [2, examples, classes], one-hot
    sides = sides - sides.mean(axis=1, keepdims=True)
    return _cosine(sides[0], sides[1])


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Linear correlation; 0 where one side is constant, for a constant says nothing about the other."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(x) == 0 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return _cosine(_standard(x), _standard(y))


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Correlation of the ranks, equal values sharing their mean rank."""
    return pearson(ranks(np.asarray(x)), ranks(np.asarray(y)))


def _standard(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred, and of size 1 so that squares neither overflow nor vanish."""
    x = x / np.abs(x).max()
    x = x - x.mean()
    return x / (np.abs(x).max() or 1.0)


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / size) if size > 0 else 0.0


def perplexity(loss: float, tokens: float) -> float:
    """exp of the mean loss per token, in nats; bounded so that it stays a number."""
    return math.exp(min(loss / tokens, 700.0))


def rouge_l(gold: str, written: str) -> float:
    """F1 of the longest common subsequence of words, in lower case, without punctuation; 0 where either is empty."""
    words, others = (_WORD.findall(text.lower()) for text in (gold, written))
    if not words or not others:
        return 0.0
    common = longest_common(words, others)
    return 2 * common / (len(words) + len(others))


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence, row by row of the usual table."""
    above = [0] * (len(second) + 1)
    for word in first:
        row = [0]
        for place, other in enumerate(second):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[place]))
        above = row
    return above[-1]


# Entities are read as the conlleval script does.


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """The entities (type, first word, last word) that IOB1, IOB2, BIOES or BILOU tags spell."""
    found: set[tuple[str, int, int]] = set()
    previous, kind, first = "O", "", 0
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        prefix = {"L": "E", "U": "S"}.get(prefix, prefix)
        # A tag goes on with the entity before it only as I or E after B or I of the same type.
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


# Answers are scored as in the official evaluation of SQuAD 2.0, which agrees with 1.1 where an answer exists.


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def squad_em_f1(
    predicted: Sequence[str], gold: Sequence[Sequence[str]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact match and token F1 of every question, against the gold answer that fits best; no gold means no answer."""
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


# Rankings, each for one query. `gains` are the grades of what was found, best first; 0 is not relevant.


def ndcg(gains: Sequence[float], relevant: Sequence[float], depth: int) -> float:
    """Gains discounted by log2(rank + 1), of the best that could be had from the `relevant` grades."""
    ideal = _discounted(sorted(relevant, reverse=True)[:depth])
    return _discounted(gains[:depth]) / ideal if ideal > 0 else 0.0


def _discounted(gains: Sequence[float]) -> float:
    return float(np.sum(np.asarray(gains, dtype=np.float64) / np.log2(np.arange(2, len(gains) + 2))))


def reciprocal_rank(gains: Sequence[float], depth: int) -> float:
    """1 / rank of the first relevant; 0 where there is none in the first `depth`."""
    return next((1 / rank for rank, gain in enumerate(gains[:depth], start=1) if gain > 0), 0.0)


def recall(gains: Sequence[float], relevant: int, depth: int) -> float:
    """The share of all relevant passages that are among the first `depth`."""
    return sum(gain > 0 for gain in gains[:depth]) / relevant


def auc(positive: ArrayLike, scores: ArrayLike) -> float:
    """The chance that a relevant pair scores above one that is not; ties count half."""
    wanted = np.asarray(positive, dtype=bool)
    count, others = int(wanted.sum()), int((~wanted).sum())
    above = ranks(np.asarray(scores))[wanted].sum() - count * (count + 1) / 2
    return float(above / (count * others))
