from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shearling.pipeline
from bench import write_model, write_rows
from data.tiny import evaluate
from latency.tables import table_of
from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.cli import run
from shearling.errors import ConstraintError, InputError, OutputError
from shearling.methods import Paper, Surgeon
from shearling.models.structure import structure_of
from shearling.workflows import grid as grid_module
from shearling.workflows import sweep as sweep_job
from shearling.workflows.grid import Grid, grid_of
from shearling.workflows.source import Source
from shearling.workflows.sweep import sweep_source
from tiny import model_of

BUDGETS = [{"flops": 0.8}, {"flops": 0.4}]
FIELDS = {"method", "flops", "metric", "value", "seconds", "seed", "params", "layers", "dense"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    write_model(root / "model", num_attention_heads=4)
    write_rows(root / "train.jsonl", 120)
    write_rows(root / "dev.jsonl", 40, seed=1)
    return root


def source(place: Path, **changes: Any) -> Source:
    settings: dict[str, Any] = {"samples": 64, "device": "cpu", **changes}
    return Source(str(place / "model"), str(place / "train.jsonl"), "sst2", **settings)


def sweep(place: Path, out: Path, grid: Grid, **changes: Any) -> dict[str, Any]:
    options = {key: changes.pop(key) for key in ("save", "force") if key in changes}
    return sweep_source(source(place, **changes), grid, out, evaluation=str(place / "dev.jsonl"), **options)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every (method, seed) that is measured while the test runs."""
    seen: list[tuple[str, int]] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["method"].name, kwargs["seed"]))
        return shearling.pipeline.measure(*args, **kwargs)

    monkeypatch.setattr(grid_module, "measure", counted)
    return seen


def test_every_point_once_from_one_measurement_each(
    place: Path, tmp_path: Path, measurements: list[tuple[str, int]]
) -> None:
    grid = Grid({"surgeon": Surgeon(), "paper": Paper()}, BUDGETS, seeds=(0, 3))
    record = sweep(place, tmp_path / "out", grid, save=True)
    assert sorted(measurements) == [("paper", 0), ("paper", 3), ("surgeon", 0), ("surgeon", 3)]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results == record["results"]
    assert len(results) == 8
    assert {(r["method"], r["flops"], r["seed"]) for r in results} == {
        (m, f, s) for m in ("surgeon", "paper") for f in (0.8, 0.4) for s in (0, 3)
    }
    for row in results:
        assert row.keys() >= FIELDS
        assert row["reached"]["flops"] <= row["flops"] + 1e-9
        folder = tmp_path / "out" / row["model"]
        again = evaluate(
            load_model(str(folder), device="cpu"), load_tokenizer(str(folder)), place / "dev.jsonl", "sst2"
        )
        assert again.value == pytest.approx(row["value"], abs=1e-3)
        assert row["timing"]["measured"] > 0
        assert row["flipped"]["lost"] - row["flipped"]["won"] == round((row["dense"] - row["value"]) * 40 / 100)
        assert "](curve.svg)" in (folder / "README.md").read_text()
        assert "this model" in (folder / "curve.svg").read_text()
        assert "flipped" not in json.loads((folder / "shearling.json").read_text())
    for name in ("curve.svg", "report.html"):
        assert (tmp_path / "out" / name).stat().st_size > 1000
    assert "measured latency" in (tmp_path / "out" / "report.html").read_text()


def test_an_interrupted_sweep_goes_on(
    place: Path, tmp_path: Path, measurements: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid({"surgeon": Surgeon(), "paper": Paper()}, BUDGETS)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            sweep(place, tmp_path / "out", grid)
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(r["method"], r["flops"]) for r in kept] == [("surgeon", 0.8), ("surgeon", 0.4), ("paper", 0.8)]
    measurements.clear()
    record = sweep(place, tmp_path / "out", grid)
    assert measurements == [("paper", 0)]
    assert record["results"][:3] == kept
    assert record["results"][3]["flipped"]["examples"] == 40  # also where the dense score was known before
    whole = sweep(place, tmp_path / "whole", grid)
    assert [r["value"] for r in record["results"]] == [r["value"] for r in whole["results"]]


def stop_after(patch: pytest.MonkeyPatch, points: int) -> None:
    """Ctrl-C while the point after these is being pruned."""
    real: Callable[..., Any] = shearling.pipeline.Plan.meet
    count = 0

    def meet(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > points:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    patch.setattr(shearling.pipeline.Plan, "meet", meet)


def test_stock_shapes_may_be_swept_and_are_a_sweep_of_their_own(place: Path, tmp_path: Path) -> None:
    grid = Grid({"surgeon": Surgeon()}, BUDGETS[:1], shape="stock")
    record = sweep(place, tmp_path / "out", grid)
    (point,) = record["results"]
    assert len({tuple(layer.values()) for layer in point["layers"] if any(layer.values())}) == 1
    with pytest.raises(InputError, match="shape"):
        sweep(place, tmp_path / "out", Grid({"surgeon": Surgeon()}, BUDGETS[:1]))


def test_more_points_may_be_added_but_settings_may_not_change(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep(place, out, Grid({"surgeon": Surgeon()}, BUDGETS[:1]))
    record = sweep(place, out, Grid({"surgeon": Surgeon(), "paper": Paper()}, BUDGETS[1:]))
    assert len(record["results"]) == 3
    with pytest.raises(OutputError, match=r"samples 64 \(now 32\)"):
        sweep(place, out, Grid({"surgeon": Surgeon()}, BUDGETS), samples=32)
    with pytest.raises(OutputError, match=r"methods\.surgeon"):
        sweep(place, out, Grid({"surgeon": Surgeon(refit=False)}, BUDGETS))
    afresh = sweep(place, out, Grid({"surgeon": Surgeon()}, BUDGETS[:1]), samples=32, force=True)
    assert len(afresh["results"]) == 1


def test_damaged_and_foreign_folders_are_refused(place: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    grid = Grid({"surgeon": Surgeon()}, BUDGETS[:1])
    for force in (False, True):
        with pytest.raises(OutputError, match="holds no sweep"):
            sweep(place, foreign, grid, force=force)
    assert (foreign / "thesis.txt").read_text() == "years of work"
    sweep(place, tmp_path / "out", grid)
    (tmp_path / "out" / "results.json").write_text('[{"method": ')
    with pytest.raises(OutputError, match="--force"):
        sweep(place, tmp_path / "out", grid)


def test_a_budget_that_cannot_be_met_is_skipped_and_told(place: Path, tmp_path: Path) -> None:
    record = sweep(place, tmp_path / "out", Grid({"surgeon": Surgeon()}, [{"flops": 1e-4}, {"flops": 0.5}]))
    assert [r["flops"] for r in record["results"]] == [0.5]
    assert record["skipped"][0]["constraint"] == {"flops": 1e-4}
    assert "flops=0.0001" in record["skipped"][0]["why"]


def test_the_command(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "sweep", str(place / "model"), "--data", str(place / "train.jsonl"), "--eval", str(place / "dev.jsonl"),
        "--task", "sst2", "--params", "0.6,0.3", "--out", str(tmp_path / "out"), "--samples", "64", "--device", "cpu",
        "--quiet", "--json",
    ]  # fmt: skip
    assert run(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(r["method"], r["params"]) for r in record["results"]] == [("surgeon", 0.6), ("surgeon", 0.3)]
    assert run([*arguments[:-1], "--samples", "32"]) == 2
    assert "samples" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_done(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "sweep", str(place / "model"), "--data", str(place / "train.jsonl"), "--eval", str(place / "dev.jsonl"),
        "--task", "sst2", "--flops", "0.6,0.3", "--methods", "surgeon,paper", "--seed", "4", "--device", "cpu",
        "--out", str(tmp_path / "out"), "--samples", "32", "--dry-run",
    ]  # fmt: skip
    assert run([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["points"]) == 4
    assert record["points"][0] == {"method": "surgeon", "constraint": {"flops": 0.6}, "seed": 4}
    assert (record["measurements"], record["samples"], record["evaluations"]) == (2, 32, 5)
    assert run(arguments) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"flops": "0.5,x"}, "'x' is not a number"),
        ({"flops": "1.5"}, "1.5"),
        ({"flops": ""}, "no budgets"),
        ({"flops": "0.5", "params": "0.5"}, "one kind of budget"),
        ({"latency": "0.5"}, "--table"),
        ({"seeds": "0,-1"}, "seed=-1"),
        ({"seeds": str(2**63)}, "seed=9223372036854775808"),
        ({"table": Path("gone.json")}, "--latency only"),
        ({"table": Path("gone.json"), "params": "0.5"}, "--latency only"),
        ({"table": Path("gone.json"), "latency": "0.5"}, "Cannot read the latency table gone.json"),
    ],
)
def test_grids_that_make_no_sense(words: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        grid_of("surgeon", **{"seeds": "0", **words})
    with pytest.raises(InputError, match="No method 'magic'"):
        grid_of("magic", "0")


@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_table_is_checked_before_any_work(
    rehearsed: bool, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], measurements: list[Any]
) -> None:
    arguments = [
        "sweep", str(place / "model"), "--data", str(place / "train.jsonl"), "--eval", str(place / "dev.jsonl"),
        "--task", "sst2", "--latency", "0.5", "--table", str(tmp_path / "table.json"), "--out", str(tmp_path / "out"),
        "--device", "cpu", *(["--dry-run"] if rehearsed else []),
    ]  # fmt: skip
    assert run(arguments) == 2
    assert "Cannot read the latency table" in capsys.readouterr().err
    (tmp_path / "table.json").write_text("{")
    assert run(arguments) == 2
    assert "is not a latency table" in capsys.readouterr().err.replace("\n", " ")
    table_of(structure_of(model_of("roberta"))).save(tmp_path / "table.json")  # sound, but of another model
    assert run(arguments) == 2
    assert "The latency table is of a roberta model" in capsys.readouterr().err.replace("\n", " ")
    assert measurements == []
    assert not (tmp_path / "out").exists()


def test_budgets_are_checked_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConstraintError):
        sweep_source(Source("nowhere"), Grid({"surgeon": Surgeon()}, [{"flops": 0.0}]), tmp_path / "out")


@pytest.mark.parametrize("saved_before", [True, False])
def test_a_sweep_stopped_while_it_saves_keeps_every_finished_point(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_before: bool
) -> None:
    grid, out = Grid({"surgeon": Surgeon()}, BUDGETS), tmp_path / "out"
    if not saved_before:
        sweep(place, out, grid)  # without the models, which are wanted now
    with monkeypatch.context() as patch:
        patch.setattr(sweep_job, "companions_of", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sweep(place, out, grid, save=True)
    kept = json.loads((out / "results.json").read_text())
    assert [row["flops"] for row in kept] == ([0.8] if saved_before else [0.8, 0.4])
    record = sweep(place, out, grid, save=True)
    assert [row["flops"] for row in record["results"]] == [0.8, 0.4]
    assert all((out / row["model"]).is_dir() for row in record["results"])
    assert record["results"][0]["value"] == kept[0]["value"]
