"""Every experiment of the laboratory runs on a tiny model, from measuring to its table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(HERE))

from common import Lab  # noqa: E402 - found through the path

BUDGETS = (0.7, 0.5)
FOUND = {path.stem for path in HERE.glob("*.py") if "\ndef rows(lab: Lab)" in path.read_text("utf-8")}
EXPERIMENTS = sorted(FOUND - {"shapes"})  # that one has models of its own, of base size


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_on_a_tiny_model(
    name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    for setting, value in {"BUDGETS": BUDGETS, "SIZES": (32, 64), "ROUNDS": 3}.items():
        if hasattr(module, setting):
            monkeypatch.setattr(module, setting, value)
    found = list(module.rows(lab))
    assert found
    module.show(found, lab)
    assert capsys.readouterr().out.strip()
