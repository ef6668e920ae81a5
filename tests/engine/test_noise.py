"""Noise keeps special tokens, does not depend on how examples are batched, and reaches measuring and refitting."""

from __future__ import annotations

import pytest
import torch

import shearling
import shearling.methods.surgeon
from families import tiny_batches, tiny_model
from shearling.engine.noise import noised, special_tokens, with_random_tokens
from shearling.methods import Surgeon
from shearling.pipeline import measure
from shearling.sample.batch import Batch
from tiny import model_of


def test_noise_moves_tokens_to_their_own_places() -> None:
    tokens = torch.arange(40).view(8, 5)
    movable = torch.ones_like(tokens, dtype=torch.bool)
    movable[:, 0] = False
    found = noised(tokens, movable, 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(found[:, 0], tokens[:, 0])
    assert torch.equal(found % 5, tokens % 5)  # another example's token, at the same place
    assert 0.2 < float((found != tokens)[:, 1:].float().mean()) < 0.8
    assert torch.equal(noised(tokens, movable, 0.0, torch.Generator()), tokens)


def test_special_tokens_of_a_config_and_its_parts() -> None:
    config = model_of("bert").config
    config.pad_token_id, config.eos_token_id = 0, [7, 9]
    assert special_tokens(config) == {0, 7, 9}


def texts(count: int = 400, length: int = 50) -> Batch:
    ids = torch.randint(10, 60, (count, length), generator=torch.Generator().manual_seed(1))
    ids[:, 3] = 7
    return Batch({"input_ids": ids}, {}, torch.arange(count))


def test_random_tokens_go_into_about_every_other_text() -> None:
    model = tiny_model("gpt2")
    model.config.eos_token_id = 7
    batch = texts()
    before, after = batch.inputs["input_ids"], with_random_tokens(batch, 0.3, model).inputs["input_ids"]
    changed = before != after
    assert 0.4 < float(changed.any(1).float().mean()) < 0.6
    assert float(changed[changed.any(1)].float().mean()) == pytest.approx(0.3, abs=0.03)
    assert (after[:, 3] == 7).all()  # it has a meaning
    assert int(after.max()) < model.get_input_embeddings().num_embeddings
    assert torch.equal(before, texts().inputs["input_ids"])  # the batch that was given is left alone


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_the_places_of_an_image_stay(family: str) -> None:
    """As many as the image has patches; a random token is none of them."""
    model, places = tiny_model(family), {"gemma3": 4, "llava": 16}[family]
    ids = torch.cat([torch.full((40, places), 59), texts(40, 20).inputs["input_ids"].clamp_max(56)], 1)
    batch = Batch({"input_ids": ids, "pixel_values": torch.randn(40, 3, 16, 16)}, {}, torch.arange(40))
    after = with_random_tokens(batch, 0.9, model).inputs["input_ids"]
    assert torch.equal(after == 59, ids == 59)
    assert not torch.equal(after, ids)
    sample = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": batch.inputs["pixel_values"]}]
    pruned = shearling.prune(model, sample, flops=0.6, method=Surgeon(polish=1))
    assert (pruned.report.check or 0) < 1e-3


def test_a_text_is_changed_in_the_same_way_in_any_batch() -> None:
    model, batch = tiny_model("gpt2"), texts(30)
    whole = with_random_tokens(batch, 0.3, model).inputs["input_ids"]
    places = torch.tensor([17, 3, 29])
    some = batch.pick(places)
    shorter = Batch({"input_ids": some.inputs["input_ids"][:, :20]}, {}, some.indices)
    assert torch.equal(with_random_tokens(shorter, 0.3, model).inputs["input_ids"], whole[places, :20])


@pytest.mark.parametrize(
    ("family", "method", "expected"),
    [
        ("gpt2", Surgeon(), True),
        ("gpt2", Surgeon(noise=0.0), False),
        ("gpt2", Surgeon(labels=True), False),
        ("bert", Surgeon(), False),
        ("t5", Surgeon(), False),
    ],
)
def test_only_language_models_see_it(
    family: str, method: Surgeon, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watching(batch: Batch, share: float, model: object) -> Batch:
        seen.append(share)
        return with_random_tokens(batch, share, model)

    monkeypatch.setattr(shearling.methods.surgeon, "with_random_tokens", watching)
    batches = [b | {"labels": b["input_ids"]} for b in tiny_batches(family, 3)]
    plan = measure(tiny_model(family), batches, method=method)
    measured = len(seen)
    plan.prune(flops=0.6)
    assert (measured > 0, len(seen) > measured) == (expected, expected)
