from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import write_model, write_rows
from latency.tables import table_of
from shearling.checkpoint.pretrained import load_model
from shearling.cli import run
from shearling.errors import ConstraintError, InputError, TableError
from shearling.methods import Surgeon
from shearling.models.structure import structure_of
from shearling.target import Target
from shearling.workflows.evaluate import known_dense
from shearling.workflows.max_drop import HIGHEST, Drop, Tried, drop_of, smallest
from shearling.workflows.pruning import prune_source
from shearling.workflows.source import Source


def tries(loss: Callable[[float], float], allowed: float) -> Callable[[float], tuple[float | None, Tried]]:
    """Budgets whose loss is known; the "model" is the budget itself."""

    def attempt(budget: float) -> tuple[float | None, Tried]:
        lost = loss(budget)
        return budget, Tried(budget, 90 - lost, lost, lost <= allowed)

    return attempt


@pytest.mark.parametrize("edge", [0.01, 0.02, 0.13, 0.37, 0.5, 0.9, 0.94])
def test_finds_the_edge_of_a_falling_curve(edge: float) -> None:
    found, tried = smallest(tries(lambda budget: 0.0 if budget >= edge else 5.0, 1.0))
    assert found == edge
    assert len(tried) <= 8


@given(st.lists(st.floats(0, 3), min_size=100, max_size=100))
def test_never_returns_what_loses_too_much(losses: list[float]) -> None:
    """Whatever the curve looks like, the result was tried and allowed, and is the smallest such."""
    found, tried = smallest(tries(lambda budget: losses[round(budget * 100)], 1.0))
    allowed = [t.budget for t in tried if t.drop is not None and t.drop <= 1.0]
    assert found == (min(allowed) if allowed else None)
    if found is None:
        assert {t.budget for t in tried} >= set(HIGHEST)


def test_an_infeasible_budget_is_no_failure() -> None:
    def attempt(budget: float) -> tuple[float | None, Tried]:
        if budget < 0.3:
            return None, Tried(budget, None, None, False, "cannot be met")
        return budget, Tried(budget, 90.0, 0.0, True)

    assert smallest(attempt)[0] == 0.3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drop")
    write_model(root / "model")
    write_rows(root / "train.jsonl", 80)
    write_rows(root / "dev.jsonl", 40, seed=1)
    return root


def source(place: Path) -> Source:
    return Source(str(place / "model"), str(place / "train.jsonl"), "sst2", device="cpu")


def test_the_report_lists_what_was_tried_and_holds_the_promise(place: Path) -> None:
    rows = str(place / "dev.jsonl")
    pruned = prune_source(
        source(place), Target(), Surgeon(), out=place / "out", evaluation=rows, drop=Drop(2.0), timing=False
    )
    record = pruned.report.to_json()
    found = record["max_drop"]
    assert found["dense"] - found["value"] <= 2.0 + 1e-9
    chosen = record["constraint"]["flops"]
    assert chosen == min(t["budget"] for t in found["tried"] if t["allowed"])
    assert pruned.report.flops.ratio <= chosen
    saved = json.loads((place / "out" / "shearling.json").read_text())
    assert saved["max_drop"] == found
    (scored,) = saved["evaluations"]
    assert (scored["value"], scored["dense"]) == (round(found["value"], 4), round(found["dense"], 4))
    assert f"**{found['value']:.2f}**" in (place / "out" / "README.md").read_text()
    assert "](curve.svg)" in (place / "out" / "README.md").read_text()
    assert "chosen" in (place / "out" / "curve.svg").read_text()
    assert known_dense(saved, scored) == scored["dense"]
    assert pruned.flipped is not None
    assert pruned.flipped["lost"] - pruned.flipped["won"] == round((found["dense"] - found["value"]) * 40 / 100)
    assert "flipped" not in saved  # a checkpoint holds no texts of the evaluation set
    page = pruned.write_report(place / "page.html", directory="out").read_text()
    assert "within the limit" in page
    from data.tiny import evaluate
    from shearling.checkpoint.pretrained import load_model, load_tokenizer

    again = evaluate(
        load_model(str(place / "out"), device="cpu"), load_tokenizer(str(place / "out")), place / "dev.jsonl", "sst2"
    )
    assert again.value == pytest.approx(found["value"], abs=1e-6)


def test_the_budget_may_be_a_latency(place: Path) -> None:
    """The table is read once for all tries, and one of another model is refused before measuring."""
    structure = structure_of(load_model(str(place / "model"), device="cpu"))
    heads, filters = (structure.sizes[0][kind] for kind in ("heads", "filters"))
    table = table_of(structure, heads={n: float(n) for n in range(heads + 1)}, filters={0: 0.0, 1: 0.1, filters: 9.0})
    table.save(place / "table.json")
    asked: dict[str, Any] = {"evaluation": str(place / "dev.jsonl"), "drop": Drop(100.0, by="latency"), "timing": False}
    target = Target(table=place / "table.json", correct=False)
    record = prune_source(source(place), target, Surgeon(polish="off"), **asked).report.to_json()
    assert record["max_drop"]["by"] == "latency"
    assert set(record["constraint"]) == {"latency"}
    with pytest.raises(TableError, match="distilbert"):
        prune_source(source(place), Target(table=replace(table, model_type="distilbert")), Surgeon(), **asked)


def test_nothing_will_do(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that loses ten points at every budget: exit 2, one message, nothing written."""
    import shearling.evaluation.exam as evaluation

    real = evaluation.Exam.take
    dense: list[float] = []

    def worse(self: evaluation.Exam, *args: object, **kwargs: object) -> evaluation.Evaluation:
        result = real(self, *args, **kwargs)  # type: ignore[arg-type]
        dense.append(result.value)
        return result if len(dense) == 1 else replace(result, value=dense[0] - 10)

    monkeypatch.setattr(evaluation.Exam, "take", worse)
    arguments = ["prune", str(place / "model"), "--data", str(place / "train.jsonl"), "--task", "sst2"]
    more = ["--max-drop", "1", "--eval", str(place / "dev.jsonl"), "--out", str(place / "none"), "--device", "cpu"]
    assert run([*arguments, *more, "--quiet"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "The least lost was 10.00" in message
    assert not (place / "none").exists()


def test_options_that_do_not_go_together(place: Path) -> None:
    with pytest.raises(ConstraintError, match="leave out --flops"):
        Drop(1.0).checked(Target(flops=0.5))
    with pytest.raises(ConstraintError, match="makes no sense"):
        Drop(-1.0).checked(Target())
    with pytest.raises(ConstraintError, match="makes no sense"):
        Drop(float("nan")).checked(Target())
    with pytest.raises(ConstraintError, match="shearling profile"):
        Drop(1.0, by="latency").checked(Target())
    with pytest.raises(InputError, match="flops, params and latency"):
        Drop(1.0, by="heads").checked(Target())
    with pytest.raises(InputError, match="--by is of use with --max-drop only"):
        drop_of(None, "params")
    with pytest.raises(InputError, match="--limit is of use with --eval only"):
        prune_source(source(place), Target(flops=0.5), Surgeon(), limit=100)
    assert drop_of(None) is None
