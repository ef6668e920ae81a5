"""`shearling.export`: the words of the command, from Python."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import shearling
from bench import write_model, write_rows
from folders import TEXTS
from shearling.cli.export import export as command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    write_model(root / "model")
    write_rows(root / "dev.jsonl", 24)
    return root


def test_the_words_are_those_of_the_command() -> None:
    words = set(inspect.signature(shearling.export).parameters)
    options = {name.rstrip("_") for name in inspect.signature(command).parameters}
    assert words - {"progress"} == options - {"quiet", "as_json"}


def test_a_directory(place: Path, tmp_path: Path) -> None:
    rows = str(place / "dev.jsonl")
    found = shearling.export(
        place / "model", tmp_path / "m.pt2", format="torch", data=TEXTS, eval=rows, task="sst2", progress=False
    )
    assert found.out.is_file()
    assert found.scores is not None
    assert found.scores["exported"] == found.scores["model"]
    program = torch.export.load(str(found.out)).module()
    assert program is not None


@pytest.mark.slow
def test_what_prune_gave(place: Path, tmp_path: Path) -> None:
    small = shearling.prune(place / "model", TEXTS * 4, flops=0.5, device="cpu", progress=False)
    found = shearling.export(small, tmp_path / "m.pt2", format="torch", progress=False)
    assert found.difference.largest < 1e-4
    assert found.this.model == "bert, pruned to 50% of its FLOPs"
    assert "difference from PyTorch" in str(found)


def test_words_that_make_no_sense(place: Path, tmp_path: Path) -> None:
    for options, told in (
        ({"fp16": True, "int8": True}, "--fp16 and --int8"),
        ({"quantise": "never"}, "dynamic and static"),
        ({"format": "abacus"}, "abacus"),
    ):
        with pytest.raises(shearling.InputError, match=told):
            shearling.export(place / "model", tmp_path / "m", progress=False, **options)  # type: ignore[arg-type]
    with pytest.raises(shearling.ModelError, match="save this model first"):
        shearling.export(torch.nn.Identity(), tmp_path / "m", progress=False)  # type: ignore[arg-type]
    assert not (tmp_path / "m").exists()
