"""Texts of a language model's own: from its distribution, behind any token, ended where it ends them."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from families import FAMILIES, tiny_batches, tiny_model
from shearling.engine.head import predicts_next_token
from shearling.engine.own_texts import LENGTH, with_own_texts
from shearling.engine.polish import polish
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from shearling.sample.read import accepted_by, sample_of
from shearling.sample.sample import Group, Sample

DECODERS = [name for name, family in FAMILIES.items() if family.cls.endswith(("ForCausalLM", "LMHeadModel"))]


def sample_for(model: torch.nn.Module, texts: int = 12, length: int = 9) -> Sample:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 60, (texts, length), generator=generator)
    return sample_of([{"input_ids": ids}], accepted=accepted_by(model))


def own_of(sample: Sample, both: Sample) -> Group:
    (own,) = both.without(sample).groups
    return own


@pytest.mark.parametrize("family", DECODERS)
def test_every_decoder_writes_texts_of_its_own(family: str) -> None:
    model = tiny_model(family)
    if not predicts_next_token(model):
        pytest.skip("not a language model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample = sample_for(model)
    both = with_own_texts(model, sample, 0)
    assert both.examples == 2 * sample.examples
    own = own_of(sample, both)
    assert int(own.indices.min()) > max(int(group.indices.max()) for group in sample.groups)
    assert own.tokens.max() <= 9
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_texts_are_drawn_by_the_seed_alone() -> None:
    model = tiny_model("llama")
    sample = sample_for(model)
    torch.manual_seed(1)
    first = with_own_texts(model, sample, 5)
    state = torch.get_rng_state()
    again, other = with_own_texts(model, sample, 5), with_own_texts(model, sample, 6)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(state, torch.get_rng_state())


def test_they_follow_the_model_and_end_where_it_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    last, end = model.config.vocab_size - 1, model.config.eos_token_id

    def counting(input_ids: torch.Tensor, **rest: object) -> CausalLMOutputWithPast:
        """The next token is always the one plus one."""
        logits = torch.full((*input_ids.shape, last + 1), -1e4)
        return CausalLMOutputWithPast(logits=logits.scatter(-1, (input_ids[..., None] + 1).clamp(max=last), 0.0))

    sample = sample_for(model, texts=60)
    monkeypatch.setattr(model, "forward", counting)
    asked = {"top_k": 1, "top_p": 0.1, "temperature": 5.0, "max_length": 3, "repetition_penalty": 1e6}
    model.generation_config.update(**asked)  # what a checkpoint may ask for
    own = own_of(sample, with_own_texts(model, sample, 0))
    ended = 0
    for at, length in enumerate(own.tokens.tolist()):
        ids = own.batch(torch.tensor([at])).inputs["input_ids"][0, :length].tolist()
        assert ids == [min(ids[0] + step, last) for step in range(length)]
        assert length == 9 or ids[-1] == end
        ended += length < 9
    assert ended  # token 0 begins some text


def test_a_token_that_begins_every_text_begins_these_too() -> None:
    model = tiny_model("llama")
    ids = torch.randint(4, 60, (6, 8))
    ids[:, 0] = model.config.bos_token_id
    sample = sample_of([{"input_ids": ids}], accepted=accepted_by(model))
    own = own_of(sample, with_own_texts(model, sample, 0)).batch(torch.arange(6)).inputs["input_ids"]
    assert (own[:, 0] == model.config.bos_token_id).all()
    assert len(own[:, 1].unique()) > 2
    ids[0, 0] = 7
    mixed = sample_of([{"input_ids": ids}], accepted=accepted_by(model))
    drawn = own_of(mixed, with_own_texts(model, mixed, 0)).batch(torch.arange(6)).inputs["input_ids"]
    assert (drawn[:, 0] != model.config.bos_token_id).any()


def test_many_texts_are_as_long_as_the_samples_up_to_a_limit() -> None:
    model = tiny_model("gpt2")
    sample = sample_for(model, texts=3, length=30)
    assert own_of(sample, with_own_texts(model, sample, 0)).tokens.max() <= 30 < LENGTH


@pytest.mark.parametrize("family", ["bert", "t5", "vit"])
def test_other_models_write_nothing(family: str) -> None:
    model = tiny_model(family)
    sample = sample_of(tiny_batches(family, 4), accepted=accepted_by(model))
    assert with_own_texts(model, sample, 0) is sample


def test_polish_trains_on_them_and_says_so() -> None:
    teacher = structure_of(tiny_model("llama"))
    student = structure_of(shrink(teacher.model, [torch.arange(0, s.units, 2) for s in teacher.sublayers]))
    sample = sample_for(teacher.model)
    result = polish(teacher, student, sample, 2, share=0.5)
    assert (result.examples, result.own) == (12, 12)
    assert result.to_json()["own"] == 12
