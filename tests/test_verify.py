"""The self-check finds what it is there to find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shearling
from shearling import verify
from shearling.costs import flops_limit
from shearling.errors import CheckFailed
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.sample.read import sample_of
from shearling.verify import check_cut, self_check
from tiny import batches_of, model_of

KEPT = [torch.tensor([0, 2]), torch.arange(20), torch.tensor([1]), torch.arange(5, 30)]


@pytest.fixture
def pair() -> tuple[Structure, Structure]:
    model = model_of("bert")
    return structure_of(model), structure_of(shrink(model, KEPT))


def test_a_sound_model_passes(pair: tuple[Structure, Structure]) -> None:
    assert self_check(*pair, KEPT, sample_of(batches_of(1)), []) < 1e-4


def test_repaired_weights_pass(pair: tuple[Structure, Structure]) -> None:
    """The comparison is with the masked model that has the new weights."""
    for sublayer in pair[1].sublayers:
        sublayer.write(sublayer.weight * 1.3, None if sublayer.bias is None else sublayer.bias + 0.1)
    assert self_check(*pair, KEPT, sample_of(batches_of(1)), []) < 1e-4


def test_a_sound_cut_passes(pair: tuple[Structure, Structure]) -> None:
    assert check_cut(*pair, KEPT, sample_of(batches_of(1))) < 1e-4
    nothing = [torch.zeros(0, dtype=torch.long)] * 4
    empty = structure_of(shrink(pair[0].model, nothing))
    assert check_cut(pair[0], empty, nothing, sample_of(batches_of(1))) < 1e-4


@pytest.mark.parametrize("sublayer", range(4))
def test_wrong_units_are_found(pair: tuple[Structure, Structure], sublayer: int) -> None:
    wrong = [units + 1 if number == sublayer else units for number, units in enumerate(KEPT)]
    other = structure_of(shrink(pair[0].model, wrong))
    with pytest.raises(CheckFailed, match="differ from the masked model's"):
        check_cut(pair[0], other, KEPT, sample_of(batches_of(1)))


def test_a_damaged_core_is_found(pair: tuple[Structure, Structure]) -> None:
    with torch.no_grad():
        pair[1].model.bert.embeddings.LayerNorm.weight.mul_(1.5)
    with pytest.raises(CheckFailed, match="differ"):
        self_check(*pair, KEPT, sample_of(batches_of(1)), [])


def test_values_that_are_not_finite_are_found(pair: tuple[Structure, Structure]) -> None:
    with torch.no_grad():
        pair[1].sublayers[1].weight[0, 0] = float("inf")
    with pytest.raises(CheckFailed, match="not finite"):
        self_check(*pair, KEPT, sample_of(batches_of(1)), [])


def test_a_broken_budget_is_found(pair: tuple[Structure, Structure]) -> None:
    limit = flops_limit(pair[0], [12.0] * 4, 0.1)
    with pytest.raises(CheckFailed, match="its budget is"):
        self_check(*pair, KEPT, sample_of(batches_of(1)), [limit])


def test_the_report_holds_the_difference() -> None:
    pruned = shearling.prune(model_of("bert"), batches_of(), flops=0.5)
    assert pruned.report.check is not None
    assert 0 <= pruned.report.check < 1e-3


def renamed(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    """Models give their outputs under other names, and those that are not named not at all."""
    stock = verify.run

    def run(*args: Any) -> dict[str, Any]:
        outputs = stock(*args)
        return {new: outputs[old].argmax(-1) if new == "choice" else outputs[old] for old, new in names.items()}

    monkeypatch.setattr(verify, "run", run)


def test_outputs_of_any_name_are_compared(pair: tuple[Structure, Structure], monkeypatch: pytest.MonkeyPatch) -> None:
    renamed(monkeypatch, logits="house")
    assert self_check(*pair, KEPT, sample_of(batches_of(1)), []) < 1e-4
    with torch.no_grad():
        pair[1].model.classifier.bias += 1
    with pytest.raises(CheckFailed, match="differ"):
        self_check(*pair, KEPT, sample_of(batches_of(1)), [])


def test_nothing_to_compare_is_no_pass(pair: tuple[Structure, Structure], monkeypatch: pytest.MonkeyPatch) -> None:
    renamed(monkeypatch, logits="choice")
    with pytest.raises(CheckFailed, match="no floating-point tensor"):
        self_check(*pair, KEPT, sample_of(batches_of(1)), [])


def test_tf32_of_the_user_is_off_meanwhile(pair: tuple[Structure, Structure], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would differ by more than the tolerance."""
    stock, seen = verify.run, []

    def run(*args: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return stock(*args)

    monkeypatch.setattr(verify, "run", run)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        self_check(*pair, KEPT, sample_of(batches_of(1)), [])
        check_cut(*pair, KEPT, sample_of(batches_of(1)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}
