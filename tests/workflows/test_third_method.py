"""A third method, made here: it is used by name from Python, the command line and a sweep; nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import shearling
from bench import write_model, write_rows
from shearling.cli import run
from shearling.methods import METHODS, Evidence, Method, allocate_counts, register


@dataclass(frozen=True)
class Toy(Method):
    """Keeps the units whose output columns are largest; `share` of each column's norm counts."""

    name: ClassVar[str] = "toy"
    share: float = 1.0
    loud: bool = False

    def measure(
        self, structure: Any, sample: Any, *, seed: int, stages: Any, earlier: Evidence | None = None
    ) -> list[Tensor]:
        with stages("weigh"):
            return [
                self.share * s.weight.detach().double().unflatten(1, (s.units, s.width)).square().sum((0, 2)).cpu()
                for s in structure.sublayers
            ]

    def choose(
        self, evidence: Evidence, structure: Any, limits: Sequence[Any], *, multiple_of: int, stages: Any
    ) -> list[Tensor]:
        lost = [torch.cat([torch.zeros(1), worth.sort().values.cumsum(0)]).flip(0).numpy() for worth in evidence]
        counts = allocate_counts(structure.sublayers, lost, limits, multiple_of)
        return [worth.topk(count).indices.sort().values for worth, count in zip(evidence, counts, strict=True)]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(Toy)
    yield
    del METHODS["toy"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("third")
    write_model(root / "model")
    write_rows(root / "train.jsonl", 40)
    write_rows(root / "dev.jsonl", 20, seed=1)
    return root


def command(place: Path, name: str, *more: str) -> list[str]:
    return [name, str(place / "model"), "--data", str(place / "train.jsonl"), "--device", "cpu", *more]


def test_from_python(place: Path) -> None:
    data = str(place / "train.jsonl")
    pruned = shearling.prune(str(place / "model"), data, flops=0.5, method="toy", progress=False, device="cpu")
    assert pruned.report.method == "toy"
    assert pruned.report.flops.ratio <= 0.5 + 1e-9
    assert "weigh" in pruned.report.seconds
    same = shearling.prune(str(place / "model"), data, flops=0.5, method=Toy(share=2.0), progress=False, device="cpu")
    assert same.report.settings == {"share": 2.0, "loud": False}
    assert same.report.layers == pruned.report.layers


def test_from_the_command_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "toy", "--set", "share=0.5", "--set", "loud=true", "--flops", "0.5", "--json"]
    assert run(command(place, "prune", *options, "--out", str(tmp_path / "small"))) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["method"] == "toy"
    assert record["settings"] == {"share": 0.5, "loud": True}
    assert shearling.load(tmp_path / "small") is not None


@pytest.mark.parametrize(
    ("setting", "message"), [("colour=red", "has no setting 'colour'"), ("share", "write name=value")]
)
def test_settings_that_make_no_sense(
    place: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--method", "toy", "--set", setting, "--flops", "0.5", "--dry-run"]
    assert run(command(place, "prune", *options)) == 2
    assert message in capsys.readouterr().err


def test_in_a_sweep(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "sweep")
    options = ["--eval", str(place / "dev.jsonl"), "--methods", "toy,surgeon", "--flops", "0.5", "--out", out, "--json"]
    assert run(command(place, "sweep", *options)) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {row["method"] for row in results} == {"toy", "surgeon"}
    again = shearling.sweep(
        str(place / "model"), str(place / "train.jsonl"), eval=str(place / "dev.jsonl"), flops=(0.5,),
        methods=("toy", "surgeon"), out=out, device="cpu", progress=False,
    )  # fmt: skip
    assert again["results"] == results  # the same sweep: nothing was done twice
