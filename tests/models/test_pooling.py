"""Pooling against a loop over examples without their padding, on either side of which it may be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shearling.errors import InputError, ModelError
from shearling.models.pooling import (
    GUESS,
    MODES,
    DenseModule,
    Mode,
    Pooling,
    parse_pooling,
    pool,
    pooling_of,
    set_pooling,
)
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from tiny import model_of

ALONE: dict[Mode, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(0),
    "cls": lambda h: h[0],
    "last": lambda h: h[-1],
    "max": lambda h: h.max(0).values,
    "weighted_mean": lambda h: sum((i + 1) * row for i, row in enumerate(h)) / sum(range(1, len(h) + 1)),  # type: ignore[return-value]
    "mean_sqrt_len": lambda h: h.sum(0) / len(h) ** 0.5,
}
LENGTHS = (3, 7, 1, 5)


def padded(side: str) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in LENGTHS]
    hidden, mask = torch.full((len(rows), 7, 4), 99.0, dtype=torch.float64), torch.zeros(len(rows), 7, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(len(row)) if side == "right" else slice(7 - len(row), None)
        hidden[i, where], mask[i, where] = row, 1
    return rows, {"last_hidden_state": hidden}, mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_mode(mode: Mode, side: str) -> None:
    rows, outputs, mask = padded(side)
    expected = torch.stack([ALONE[mode](row) for row in rows])
    torch.testing.assert_close(pool(outputs, mask, Pooling((mode,))), expected)


def test_without_a_mask_every_token_is_real() -> None:
    _, outputs, _ = padded("right")
    hidden = outputs["last_hidden_state"]
    torch.testing.assert_close(pool(outputs, None, Pooling(("last",))), hidden[:, -1])
    torch.testing.assert_close(pool(outputs, torch.ones(4, 3), GUESS), hidden.mean(1))


def test_modes_are_concatenated_projected_and_normalised_in_this_order() -> None:
    rows, outputs, mask = padded("right")
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(3, 8, generator=generator).double(), torch.randn(3, generator=generator).double()
    pooling = Pooling(("cls", "mean"), normalize=True, dense=(DenseModule(weight, bias, "Tanh"),))
    for row, found in zip(rows, pool(outputs, mask, pooling), strict=True):
        expected = torch.tanh(weight @ torch.cat([row[0], row.mean(0)]) + bias)
        torch.testing.assert_close(found, expected / expected.norm())


def test_two_towers_bring_their_own_embeddings() -> None:
    outputs = {"text_embeds": torch.ones(2, 3), "image_embeds": torch.zeros(2, 3), "last_hidden_state": None}
    assert pool(outputs, None, GUESS).tolist() == [[1.0, 1, 1, 0, 0, 0]] * 2
    with pytest.raises(ModelError, match="neither logits nor hidden states"):
        pool(vars(SimpleNamespace(something=1)), None, GUESS)


def test_it_stays_with_the_model_and_its_pruned_copy() -> None:
    model = model_of("bert", head="")
    assert pooling_of(model).guessed
    set_pooling(model, Pooling(("cls",), normalize=True))
    units = [torch.arange(s.units // 2) for s in structure_of(model).sublayers]
    for copied in (model, copy.deepcopy(model), shrink(model, units), model.to("cpu").eval()):
        assert pooling_of(copied).modes == ("cls",)


def test_prompts_are_chosen_as_sentence_transformers_does() -> None:
    pooling = Pooling(prompts={"query": "q: ", "passage": "p: ", "other": "o: "}, default="other")
    assert [pooling.prompt(use) for use in ("query", "document", None)] == ["q: ", "p: ", "o: "]
    assert Pooling().prompt("query") == ""
    assert Pooling(prompts={"sts": "s: "}, default="sts").prompt("query") == "s: "


def test_only_the_direction_counts_where_users_normalise_or_take_cosines() -> None:
    assert Pooling(normalize=True, similarity="dot").direction_only
    assert Pooling(similarity="cosine").direction_only
    assert not Pooling(similarity="dot").direction_only
    assert not GUESS.direction_only


def test_words() -> None:
    assert parse_pooling("cls") == Pooling(("cls",))
    assert parse_pooling("Weighted-Mean, normalize") == Pooling(("weighted_mean",), normalize=True)
    for wrong in ("average", "normalize", "", "cls,nonsense"):
        with pytest.raises(InputError, match="No pooling"):
            parse_pooling(wrong)
