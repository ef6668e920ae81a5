"""The same inputs and seed give the same bytes, twice in a row. Batch sizes: test_pipeline; ranks: test_distributed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from folders import rows_file
from shearling.cli import run

TIMES = ("seconds", "estimate")  # the estimate times the machine


@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_two_runs_write_the_same_bytes(dense: Path, tmp_path: Path, method: str) -> None:
    rows = rows_file(tmp_path / "rows.jsonl")
    for name in ("first", "second"):
        torch.manual_seed(len(name))  # nothing may depend on the state the process is in
        options = ["--flops", "0.5", "--method", method, "--seed", "3", "--device", "cpu", "--quiet"]
        assert run(["prune", str(dense), "--data", str(rows), *options, "--out", str(tmp_path / name)]) == 0
    first, second = tmp_path / "first", tmp_path / "second"
    assert [p.name for p in sorted(first.iterdir())] == [p.name for p in sorted(second.iterdir())]
    for path in first.iterdir():
        if path.name not in ("shearling.json", "README.md"):
            assert path.read_bytes() == (second / path.name).read_bytes(), path.name
    records = [json.loads((folder / "shearling.json").read_text()) for folder in (first, second)]
    for record in records:
        for name in TIMES:
            del record[name]
    assert records[0] == records[1]


def test_another_seed_draws_another_sample(dense: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl")
    found = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        options = ["--flops", "0.5", "--samples", "4", "--seed", seed, "--device", "cpu", "--quiet"]
        assert run(["prune", str(dense), "--data", str(rows), *options, "--out", str(out)]) == 0
        found.append(json.loads((out / "shearling.json").read_text())["sample"]["fingerprint"])
    assert found[0] != found[1]
