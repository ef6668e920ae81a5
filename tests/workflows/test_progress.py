"""Progress: a line a stage away from terminals, silence where it is asked for, a bar that only goes forward."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest

import shearling
from shearling.methods import METHODS, Surgeon
from shearling.workflows import progress as module
from shearling.workflows.progress import Overall, stages_of, watching
from tiny import batches_of, model_of


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    monkeypatch.setattr(module, "_drawable", lambda: False)
    monkeypatch.setattr(module, "_logged", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    return lambda: capsys.readouterr().err.splitlines()


def run() -> None:
    with watching() as watch:
        for stage, total in (("measure", 3), ("refit", 1)):
            watch(stage, 0, 1)
            for done in range(total):
                watch(stage, done + 1, total)
            watch(stage, 1, 1)  # as `Stages` ends every stage


def test_one_line_a_finished_stage(lines: Callable[[], list[str]]) -> None:
    run()
    told = lines()
    assert [line.partition(":")[0] for line in told] == ["measure", "refit"]
    assert all(re.fullmatch(r"\w+: \d+\.\d s", line) for line in told)


def test_points_of_a_sweep_tell_the_time_left(lines: Callable[[], list[str]]) -> None:
    with watching() as watch:
        for done in range(3):
            watch("sweep", done, 2)
    assert [line.partition(",")[0] for line in lines()] == ["sweep: 1 of 2 points", "sweep: 2 of 2 points"]


def test_under_logging_lines_go_to_the_log(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_logged", lambda: True)
    with caplog.at_level(logging.INFO, logger="shearling"):
        run()
    assert lines() == []
    assert len(caplog.messages) == 2


def test_silence(lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(False) as watch:
        watch("measure", 1, 1)
    monkeypatch.setenv("RANK", "1")
    run()
    assert lines() == []


def test_a_function_is_called() -> None:
    seen: list[tuple[str, int, int]] = []
    with watching(lambda *told: seen.append(told)) as watch:
        watch("measure", 1, 2)
    assert seen == [("measure", 1, 2)]


def test_the_whole_only_goes_forward_and_ends() -> None:
    whole = Overall(stages_of(Surgeon()))
    told = [whole.after(stage, done, 2) for stage in ("load", "read", "check", "refit", "check") for done in (0, 1, 2)]
    assert told == sorted(told)
    assert 0 < told[-1] < 1
    for stage in stages_of(Surgeon()):
        last = whole.after(stage, 1, 1)
    assert last == pytest.approx(1.0)


@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_a_method_says_what_its_stages_take(method: str) -> None:
    """Every stage that takes long in a run is one that the method announced, whichever method it is."""
    seen: list[str] = []
    shearling.prune(
        model_of("bert"), batches_of(4, 8), flops=0.5, method=method, progress=lambda stage, *_: seen.append(stage)
    )
    assert METHODS[method].stages.keys() <= set(seen)
    assert set(seen) - stages_of(METHODS[method]()).keys() <= {
        "search",
        "allocate",
        "shrink",
        "check",
        "agreement",
    }  # short ones


def test_the_points_of_a_sweep_are_the_whole() -> None:
    """What goes on within a point moves nothing; reading the model and the data does."""
    whole = Overall({"load": 10.0, "sweep": 90.0})
    assert whole.after("load", 1, 1) == pytest.approx(0.1)
    assert whole.after("measure", 1, 1) == pytest.approx(0.1)
    assert whole.after("sweep", 1, 2) == pytest.approx(0.55)
    assert Overall({}).after("sweep", 1, 4) == 0.25


def test_bars_are_drawn_where_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(module, "_drawable", lambda: True)
    run()
