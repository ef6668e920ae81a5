"""How alike two models are: each kind against a figure worked out by hand, and on the examples kept out alone."""

from __future__ import annotations

import math

import pytest
import torch

from shearling.engine.agreement import FEW, POOR, Agreement, Answers, agreement, answers, held_out
from shearling.sample.read import sample_of
from shearling.sample.sample import Sample
from tiny import batches_of, model_of


def sample(count: int = 4) -> Sample:
    return sample_of(batches_of(count))


def test_only_examples_kept_out_are_asked() -> None:
    whole = sample()
    some = held_out(whole)
    assert some is not None
    numbers = torch.cat([group.indices for group in some.groups])
    assert len(numbers) == whole.examples // 8
    assert bool((numbers % 8 == 7).all())
    assert held_out(whole.drawn(1, 0)) is None or held_out(whole.drawn(1, 0)).examples == 1  # type: ignore[union-attr]


def test_a_model_agrees_with_itself() -> None:
    model = model_of("bert")
    said = answers(model, sample())
    found = agreement(said, answers(model, sample()))
    assert found == Agreement("equal", 100.0, sample().examples)
    assert not found.poor
    assert found.warnings == []


def test_classes_are_counted_one_by_one() -> None:
    model = model_of("bert").eval()
    whole = sample()
    said = answers(model, whole)
    ids = {int(i): row for g in whole.groups for i, row in zip(g.indices, range(len(g)), strict=True)}
    alone = [
        int(model(**whole.groups[0].batch(torch.tensor([ids[number]])).inputs).logits.argmax())
        for number in sorted(ids)[:12]
    ]
    assert said.values[:12, 0].tolist() == alone


def test_each_kind_against_its_definition() -> None:
    stats = pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    a, b = torch.randn(50, 1), torch.randn(50, 1)
    found = agreement(Answers("spearman", a, 50), Answers("spearman", b, 50))
    assert found.value == pytest.approx(100 * stats.spearmanr(a[:, 0], b[:, 0]).statistic)
    wide, other = torch.randn(9, 5), torch.randn(9, 5)
    cosines = [float(x @ y / (x.norm() * y.norm())) for x, y in zip(wide, other, strict=True)]
    assert agreement(Answers("cosine", wide, 9), Answers("cosine", other, 9)).value == pytest.approx(
        100 * sum(cosines) / 9, rel=1e-5
    )
    losses = agreement(Answers("perplexity", torch.full((7, 1), 2.0), 3), Answers("perplexity", torch.ones(7, 1), 3))
    assert losses.value == pytest.approx(math.exp(-1.0))
    spans = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    moved = torch.tensor([[0, 1], [2, 9], [4, 5], [6, 7]])
    assert agreement(Answers("equal", spans, 4), Answers("equal", moved, 4)).value == 75.0


def test_equal_numbers_share_their_rank() -> None:
    """Many scores that are the same say nothing about their order."""
    from scipy import stats

    a, b = torch.tensor([[1.0], [1], [1], [2], [3], [3]]), torch.tensor([[2.0], [1], [3], [3], [5], [4]])
    found = agreement(Answers("spearman", a, 6), Answers("spearman", b, 6))
    assert found.value == pytest.approx(100 * stats.spearmanr(a[:, 0], b[:, 0]).statistic)
    same, other = torch.ones(6, 1), torch.zeros(6, 1)
    assert agreement(Answers("spearman", same, 6), Answers("spearman", other, 6)).value == 100.0
    assert agreement(Answers("spearman", same, 6), Answers("spearman", b, 6)).value == 0.0


@pytest.mark.parametrize("kind", POOR)
def test_a_poor_figure_is_told_unless_it_is_rough(kind: str) -> None:
    worse = 0.1 if kind == "perplexity" else -0.1
    poor = Agreement(kind, POOR[kind] + worse, FEW)  # type: ignore[arg-type, index]
    assert poor.poor
    assert "dense model" in poor.warnings[0]
    assert not Agreement(kind, POOR[kind] + worse, FEW - 1).poor  # type: ignore[arg-type, index]
    assert not Agreement(kind, POOR[kind] - worse, FEW).poor  # type: ignore[arg-type, index]


def test_a_language_model_is_judged_by_its_next_tokens() -> None:
    model = model_of("gpt2", "CausalLM").eval()
    whole = sample_of(batches_of(2))
    said = answers(model, whole)
    assert said.kind == "perplexity"
    assert len(said.values) == sum(int((g.lengths["attention_mask"] - 1).sum()) for g in whole.groups)
