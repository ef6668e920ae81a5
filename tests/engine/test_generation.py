"""Generation by the caller's options alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import tiny_model
from shearling.engine.generation import ends_of, generated

GREEDY = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 1}


def test_options_of_the_checkpoint_do_not_count() -> None:
    model = tiny_model("llama")
    prompt = {"input_ids": torch.tensor([[5, 9, 30], [7, 8, 40]])}
    plain = generated(model, prompt, GREEDY)
    model.generation_config.update(do_sample=True, temperature=9.0, top_k=3, num_beams=2, max_length=4)
    before = model.generation_config.to_dict()
    assert torch.equal(generated(model, prompt, GREEDY), plain)
    assert model.generation_config.to_dict() == before
    model.generation_config.repetition_penalty = 50.0
    assert torch.equal(generated(model, prompt, GREEDY, without=["repetition_penalty"]), plain)


def test_what_a_model_keeps_from_generating_can_be_trained_on() -> None:
    """Tensors made under `inference_mode` could not."""
    model = tiny_model("gpt2")
    tokens = generated(model, {"input_ids": torch.tensor([[5, 9, 30]])}, GREEDY)
    assert not tokens.is_inference()
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize(("end", "wanted"), [(3, {3}), ([3, 4], {3, 4}), (None, set())])
def test_ends_are_a_set(end: Any, wanted: set[int]) -> None:
    model = tiny_model("gpt2")
    model.generation_config.eos_token_id = end
    assert ends_of(model) == wanted
