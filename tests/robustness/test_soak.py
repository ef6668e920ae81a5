"""Sixty prunes in one process; `scripts/soak.py` does three hundred."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_memory_stays_flat_and_no_hook_is_left() -> None:
    # A process of its own: in this one, what earlier tests left to the allocator comes and goes.
    command = [sys.executable, str(SCRIPT), "--rounds", "60", "--megabytes", "16"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_the_verdict_sees_what_is_left(soak: ModuleType) -> None:
    flat = [{"hooks": 0, "tensors": 100, "megabytes": 300.0}] * 10
    assert soak.verdict(flat, 32) == ""
    for name, value in (("hooks", 1), ("tensors", 101), ("megabytes", 400.0)):
        assert soak.verdict([*flat, flat[0] | {name: value}], 32)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    assert soak.hooks(model) == 1
