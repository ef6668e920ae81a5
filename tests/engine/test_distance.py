"""Distances of outputs, against their definitions computed example by example."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, kl_divergence

from shearling.engine.distance import divergences, output_distance, output_scale
from shearling.sample.batch import Batch
from tiny import as_run, batches_of

CLASSES = SimpleNamespace(problem_type=None)
NUMBERS = SimpleNamespace(problem_type="regression")
LABELS = SimpleNamespace(problem_type="multi_label_classification")
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
BATCH = Batch({"attention_mask": MASK}, {}, torch.arange(3))
ONE = torch.ones(())
MODEL = SimpleNamespace(config=CLASSES)


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def distance(config: Any, name: str, s: Tensor, t: Tensor, scale: Tensor = ONE) -> float:
    return float(output_distance(config, {name: s}, {name: t}, BATCH, scale))


def test_classes() -> None:
    s, t = pair(3, 5)
    expected = kl_divergence(Categorical(logits=t), Categorical(logits=s)).mean()
    assert distance(CLASSES, "logits", s, t) == pytest.approx(float(expected), rel=1e-4)


def test_classes_that_may_hold_together() -> None:
    s, t = pair(3, 5)
    expected = kl_divergence(Bernoulli(logits=t), Bernoulli(logits=s)).sum(-1).mean()
    assert distance(LABELS, "logits", s, t) == pytest.approx(float(expected), rel=1e-4)


def test_numbers_are_measured_by_the_teachers_spread() -> None:
    s, t = pair(3, 1)
    expected = ((s - t) ** 2).mean() / t.var(correction=0)
    for size in (1, 100):  # in other units, the distance is the same
        found = distance(NUMBERS, "logits", size * s, size * t, output_scale(NUMBERS, {"logits": size * t}))
        assert found == pytest.approx(float(expected), rel=1e-4)
    assert (
        float(output_scale(NUMBERS, {"logits": torch.full((4, 1), 2.0)})) == 1
    )  # a constant has no spread to measure by
    assert float(output_scale(CLASSES, {"logits": torch.randn(4, 3)})) == 1


def test_spans_over_real_tokens() -> None:
    (s, t), other = pair(3, 4), pair(3, 4)[0].roll(1, 0)
    expected = 0.0
    for i, length in enumerate((3, 2, 4)):
        for a, b in ((s, t), (other, t)):
            expected += float(kl_divergence(Categorical(logits=b[i, :length]), Categorical(logits=a[i, :length]))) / 3
    found = output_distance(
        CLASSES, {"start_logits": s, "end_logits": other}, {"start_logits": t, "end_logits": t}, BATCH, ONE
    )
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_tokens_that_are_real() -> None:
    s, t = pair(3, 4, 6)
    tokens = kl_divergence(Categorical(logits=t), Categorical(logits=s))[MASK.bool()]
    assert distance(CLASSES, "logits", s, t) == pytest.approx(float(tokens.mean()), rel=1e-4)


def test_embeddings_by_distance_and_similarity() -> None:
    s, t = pair(3, 8)
    size = sum(float(row @ row) for row in t) / 3
    apart = sum(float((s[i] - t[i]) @ (s[i] - t[i])) for i in range(3)) / 3 / size
    within = sum(float(s[i] @ s[j] - t[i] @ t[j]) ** 2 for i in range(3) for j in range(3)) / 9 / size**2
    for unit in (1, 100):  # in other units, the distance is the same
        scale = output_scale(CLASSES, {"embedding": unit * t})
        assert distance(CLASSES, "embedding", unit * s, unit * t, scale) == pytest.approx(apart + within, rel=1e-4)
    alone = output_distance(CLASSES, {"embedding": s}, {"embedding": t}, BATCH, torch.tensor(size), similarities=0.0)
    assert float(alone) == pytest.approx(apart, rel=1e-4)
    assert distance(CLASSES, "embedding", t, t) == 0


def test_divergences_of_classes() -> None:
    batch = as_run(batches_of(1))[0]
    p, q = pair(4, 3)
    found = divergences(MODEL, {"logits": p}, {"logits": q}, batch)
    torch.testing.assert_close(found, kl_divergence(Categorical(logits=p), Categorical(logits=q)))


def test_divergences_of_several_classes_at_once() -> None:
    batch = as_run(batches_of(1))[0]
    p, q = pair(4, 3)
    found = divergences(SimpleNamespace(config=LABELS), {"logits": p}, {"logits": q}, batch)
    torch.testing.assert_close(found, kl_divergence(Bernoulli(logits=p), Bernoulli(logits=q)).sum(-1))


def test_divergences_of_numbers() -> None:
    batch = as_run(batches_of(1))[0]
    p, q = pair(4, 1)
    found = divergences(MODEL, {"logits": p}, {"logits": q}, batch)
    torch.testing.assert_close(found, 0.5 * (p - q)[:, 0] ** 2)


def test_divergences_of_tokens_and_spans_leave_padding_out() -> None:
    batch = as_run(batches_of(1))[0]
    real = batch.inputs["attention_mask"]
    p, q = pair(4, 12, 5)
    found = divergences(MODEL, {"logits": p}, {"logits": q}, batch)
    each = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    torch.testing.assert_close(found, (each * real).sum(-1))

    p, q = pair(2, 4, 12)
    ends = [dict(zip(("start_logits", "end_logits"), one, strict=True)) for one in (p, q)]
    found = divergences(MODEL, *ends, batch)
    for example, length in enumerate(real.sum(-1).tolist()):
        a, b = (Categorical(logits=one[:, example, :length]) for one in (p, q))
        assert float(found[example]) == pytest.approx(float(kl_divergence(a, b).sum()), rel=1e-4)
