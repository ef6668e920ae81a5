"""Per-example losses against the model's own loss on one example at a time, and draws against the softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from shearling.engine.hooks import run
from shearling.engine.losses import (
    check_finite,
    embeddings,
    label_losses,
    sampled_losses,
)
from shearling.errors import DataError, ModelError
from shearling.models.pooling import Pooling, set_pooling
from shearling.sample.batch import Batch, uniform
from tiny import as_run, batches_of, model_of

HEADS = {
    "classification": ("SequenceClassification", "class", {}),
    "regression": ("SequenceClassification", "number", {"num_labels": 1}),
    "question answering": ("QuestionAnswering", "span", {}),
    "token classification": ("TokenClassification", "tokens", {}),
    "masked LM": ("MaskedLM", "tokens", {}),
}
every_head = pytest.mark.parametrize("head", HEADS)


def head_and_batch(head: str, size: int = 5) -> tuple[Any, dict[str, Tensor]]:
    kind, labels, changes = HEADS[head]
    return model_of("bert", kind, **changes).double(), batches_of(1, size, labels=labels)[0]


def causal() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=60, n_positions=16)
    batch = batches_of(1, 5)[0]
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return transformers.GPT2LMHeadModel(config).double().eval(), batch


def one(batch: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """One example, without its padding."""
    size = batch["input_ids"].shape
    length = int(batch["attention_mask"][i].sum()) if "attention_mask" in batch else size[1]
    return {k: v[i : i + 1, :length] if v.shape == size else v[i : i + 1] for k, v in batch.items()}


def own_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(**one(batch, i)).loss for i in range(len(batch["input_ids"]))]).float()


def ours(model: Any, batch: dict[str, Tensor]) -> Tensor:
    (b,) = as_run([batch])
    with torch.no_grad():
        return label_losses(model, run(model, b), b).float()


@every_head
def test_label_losses_are_the_models_own(head: str) -> None:
    model, batch = head_and_batch(head)
    torch.testing.assert_close(ours(model, batch), own_losses(model, batch), rtol=1e-5, atol=1e-6)


def test_causal_language_models_predict_the_next_token() -> None:
    model, batch = causal()
    torch.testing.assert_close(ours(model, batch), own_losses(model, batch), rtol=1e-5, atol=1e-6)


def test_several_outputs_of_regression_and_several_labels() -> None:
    batch = batches_of(1, 5)[0]
    for problem in ("regression", "multi_label_classification"):
        model = model_of("bert", num_labels=3, problem_type=problem).double()
        batch["labels"] = torch.randint(0, 2, (5, 3), generator=torch.Generator().manual_seed(0)).double()
        torch.testing.assert_close(ours(model, batch), own_losses(model, batch), rtol=1e-5, atol=1e-6)


def test_answers_outside_the_window() -> None:
    """Before it counts as the first token, beyond it counts nothing: as in transformers."""
    model, batch = head_and_batch("question answering")
    batch["start_positions"][0] = -1
    torch.testing.assert_close(ours(model, batch), own_losses(model, batch), rtol=1e-5, atol=1e-6)
    batch["start_positions"][0] = 99
    alone = one(batch, 0)
    with torch.no_grad():
        end = torch.nn.functional.cross_entropy(
            model(**{k: alone[k] for k in ("input_ids", "attention_mask")}).end_logits, alone["end_positions"]
        )
    assert float(ours(model, batch)[0]) == pytest.approx(float(end) / 2, rel=1e-5)


def test_an_example_without_labelled_tokens_counts_nothing() -> None:
    model, batch = head_and_batch("token classification")
    batch["labels"][2] = -100
    assert float(ours(model, batch)[2]) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_labels_of_any_width(dtype: torch.dtype) -> None:
    for head in ("classification", "token classification", "question answering"):
        model, batch = head_and_batch(head)
        narrow = {k: v.to(dtype) if k not in ("input_ids", "attention_mask") else v for k, v in batch.items()}
        torch.testing.assert_close(ours(model, narrow), own_losses(model, batch), rtol=1e-5, atol=1e-6)


def test_labels_outside_the_heads_range_are_named() -> None:
    model, batch = head_and_batch("classification")
    batch["labels"][1] = 7
    with pytest.raises(DataError, match=r"to 7, but the head has 2 classes"):
        ours(model, batch)
    model, batch = head_and_batch("token classification")
    batch["labels"][1, 0] = -3
    with pytest.raises(DataError, match="from -3"):
        ours(model, batch)


def test_one_label_where_the_model_gives_several_is_told() -> None:
    model = model_of("bert", num_labels=3, problem_type="multi_label_classification")
    (batch,) = as_run(batches_of(1))
    with pytest.raises(DataError, match="3 labels per example"):
        label_losses(model, run(model, batch), batch)


def test_missing_labels_are_named() -> None:
    model, batch = head_and_batch("question answering")
    with pytest.raises(DataError, match="start_positions"):
        ours(model, {k: v for k, v in batch.items() if k != "start_positions"})
    with pytest.raises(DataError, match="needs labels"):
        ours(model_of("bert", ""), batches_of(1)[0])


def test_a_loss_that_is_not_a_number_names_its_example() -> None:
    batch = Batch({}, {}, torch.tensor([10, 11, 12]))
    with pytest.raises(ModelError, match="example 11 is nan"):
        check_finite([torch.tensor([0.0, float("nan"), 1.0])], [batch])
    losses = torch.ones(3)
    check_finite([losses], [batch])


@every_head
@pytest.mark.parametrize("size", [1, 3])
def test_draws_depend_on_the_seed_and_the_example_alone(head: str, size: int) -> None:
    model, batch = head_and_batch(head, size=6)
    (whole,) = as_run([batch])

    def losses(part: Batch, seed: int) -> Tensor:
        with torch.no_grad():
            return sampled_losses(model, run(model, part), part, seed)

    together = losses(whole, 5)
    apart = torch.cat([losses(whole.pick(torch.arange(i, min(i + size, len(whole)))), 5) for i in range(0, 6, size)])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together, losses(whole, 6))


def test_draws_do_not_see_the_padding() -> None:
    """The same examples padded further draw the same tokens."""
    for head in ("question answering", "token classification", "masked LM"):
        model, batch = head_and_batch(head)
        longer = {
            k: torch.nn.functional.pad(v, (0, 4), value=1 if k == "input_ids" else 0)
            for k, v in batch.items()
            if v.dim() == 2 and k != "labels"
        }
        short = {k: batch[k] for k in longer}
        values = []
        for inputs in (short, longer):
            (b,) = as_run([inputs])
            with torch.no_grad():
                values.append(sampled_losses(model, run(model, b), b, 0))
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)


def counts_of(logits: Tensor, draws: int) -> Tensor:
    """How often each class is drawn for one and the same row of logits, over many examples; read from the losses."""
    repeated = logits.expand(draws, -1)
    outputs = transformers.modeling_outputs.SequenceClassifierOutput(logits=repeated)
    model = SimpleNamespace(config=SimpleNamespace(problem_type=None))
    losses = sampled_losses(model, outputs, Batch({}, {}, torch.arange(draws)), seed=3)
    log_p = -logits.log_softmax(-1)
    return torch.bincount((losses[:, None] - log_p).abs().argmin(1), minlength=logits.shape[-1]).double()


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.5, -1.0, 0.5]])
    draws = 4000
    expected = logits.softmax(-1)[0].double() * draws
    chi_square = float(((counts_of(logits, draws) - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 3 degrees of freedom: one chance in a thousand, and the seed is fixed


def test_answers_are_never_drawn_from_padding() -> None:
    model, batch = head_and_batch("question answering")
    batch["attention_mask"][:, 3:] = 0
    for i in range(20):
        b = Batch({k: batch[k] for k in ("input_ids", "attention_mask")}, {}, torch.arange(5) + 5 * i)
        with torch.no_grad():
            assert sampled_losses(model, run(model, b), b, 0).isfinite().all()


def test_the_fisher_of_sampled_losses_is_that_of_the_softmax() -> None:
    """Mean over draws of the squared gradient: p (1 - p) on the diagonal, -p_i p_j beside it."""
    logits = torch.tensor([[0.3, -0.4, 1.0]], dtype=torch.float64)
    draws = 4000
    rows = logits.repeat(draws, 1).requires_grad_()
    outputs = transformers.modeling_outputs.SequenceClassifierOutput(logits=rows)
    model = SimpleNamespace(config=SimpleNamespace(problem_type=None))
    sampled_losses(model, outputs, Batch({}, {}, torch.arange(draws)), seed=1).sum().backward()
    g = rows.grad
    assert g is not None
    p = logits.softmax(-1)[0]
    torch.testing.assert_close(g.T @ g / draws, torch.diag(p) - torch.outer(p, p), atol=0.02, rtol=0)


def test_real_valued_outputs_meet_random_signs() -> None:
    model, batch = head_and_batch("regression")
    (b,) = as_run([batch])
    with torch.no_grad():
        outputs = run(model, b)
        losses = sampled_losses(model, outputs, b, 0)
    torch.testing.assert_close(losses.abs(), outputs.logits[:, 0].float().abs())


def test_an_embedding_is_the_mean_over_real_tokens() -> None:
    model = model_of("bert", "").double()
    (b,) = as_run(batches_of(1, 4))
    with torch.no_grad():
        outputs = run(model, b)
        losses = sampled_losses(model, outputs, b, 0)
        for i in range(4):
            length = int(b.inputs["attention_mask"][i].sum())
            alone = Batch({k: v[i : i + 1, :length] for k, v in b.inputs.items()}, {}, b.indices[i : i + 1])
            torch.testing.assert_close(
                sampled_losses(model, run(model, alone), alone, 0)[0], losses[i], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("pooling", [Pooling(("cls",), normalize=True), Pooling(("cls",), similarity="dot")])
def test_an_embedding_is_drawn_from_as_its_users_read_it(pooling: Pooling) -> None:
    """The pooled output, of length one where only directions count, times the signs of each example."""
    model = model_of("bert", head="")
    set_pooling(model, pooling)
    (batch,) = as_run(batches_of(1, 5))
    outputs = run(model, batch)
    first = outputs.last_hidden_state[:, 0]
    expected = first / first.norm(dim=-1, keepdim=True) if pooling.normalize else first
    torch.testing.assert_close(embeddings(model, outputs, batch), expected)
    ratio = sampled_losses(model, outputs, batch, 7) / (expected * _signs(batch, expected)).sum(-1)
    torch.testing.assert_close(ratio, torch.ones(5))


def _signs(batch: Batch, like: Tensor) -> Tensor:
    return (uniform(batch.indices, like.shape[-1], 7) < 0.5).to(like) * 2 - 1


def test_the_length_of_a_normalised_embedding_does_not_count() -> None:
    """A change along the embedding itself has no gradient."""
    model = model_of("bert", head="")
    set_pooling(model, Pooling(normalize=True))
    (batch,) = as_run(batches_of(1, 5))
    hidden = run(model, batch).last_hidden_state.detach().requires_grad_()
    sampled_losses(model, {"last_hidden_state": hidden}, batch, 0).sum().backward()
    assert hidden.grad is not None
    along = (hidden.grad * hidden).sum((1, 2))
    assert along.abs().max() < 1e-4 * hidden.grad.abs().sum()
