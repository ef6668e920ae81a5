"""The divergence of two models' outputs, against distributions written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, kl_divergence

from shearling.engine.divergence import of_examples
from tiny import as_run, batches_of


def model(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config))


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def test_classes() -> None:
    batch = as_run(batches_of(1))[0]
    p, q = drawn(4, 3)
    found = of_examples(model(problem_type=None), {"logits": p}, {"logits": q}, batch)
    torch.testing.assert_close(found, kl_divergence(Categorical(logits=p), Categorical(logits=q)))


def test_several_classes_at_once() -> None:
    batch = as_run(batches_of(1))[0]
    p, q = drawn(4, 3)
    found = of_examples(model(problem_type="multi_label_classification"), {"logits": p}, {"logits": q}, batch)
    torch.testing.assert_close(found, kl_divergence(Bernoulli(logits=p), Bernoulli(logits=q)).sum(-1))


def test_numbers() -> None:
    batch = as_run(batches_of(1))[0]
    p, q = drawn(4, 1)
    found = of_examples(model(problem_type=None), {"logits": p}, {"logits": q}, batch)
    torch.testing.assert_close(found, 0.5 * (p - q)[:, 0] ** 2)


def test_tokens_and_spans_leave_padding_out() -> None:
    batch = as_run(batches_of(1))[0]
    real = batch.inputs["attention_mask"]
    p, q = drawn(4, 12, 5)
    found = of_examples(model(problem_type=None), {"logits": p}, {"logits": q}, batch)
    each = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    torch.testing.assert_close(found, (each * real).sum(-1))

    p, q = drawn(2, 4, 12)
    ends = [dict(zip(("start_logits", "end_logits"), one, strict=True)) for one in (p, q)]
    found = of_examples(model(), *ends, batch)
    for example, length in enumerate(real.sum(-1).tolist()):
        a, b = (Categorical(logits=one[:, example, :length]) for one in (p, q))
        assert float(found[example]) == pytest.approx(float(kl_divergence(a, b).sum()), rel=1e-4)
