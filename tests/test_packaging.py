"""The package as an installer and a shell see it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import shearling
from shearling.cli import run

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {"data", "plot", "export", "demo", "docs", "dev"}
OPTIONAL = ("datasets", "sklearn", "matplotlib", "onnx", "onnxruntime", "rich", "typer", "accelerate", "pyarrow")


def python(code: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds this source tree."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]).strip(os.pathsep)
    settings = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=check)


@pytest.mark.slow  # a new process that imports everything
def test_the_core_runs_where_nothing_optional_is_installed() -> None:
    """Every public name, and pruning, saving and loading, want torch, transformers, safetensors and numpy alone."""
    code = f"""
import importlib.machinery, sys, tempfile

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {OPTIONAL} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
import shearling, torch
for name in shearling.__all__:
    getattr(shearling, name)
from transformers import BertConfig, BertForSequenceClassification

sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
model = BertForSequenceClassification(BertConfig(**sizes)).eval()
batches = [{{"input_ids": torch.randint(0, 40, (8, 6))}} for _ in range(8)]
with tempfile.TemporaryDirectory() as folder:
    shearling.prune(model, batches, flops=0.5).save(folder + "/half")
    print(shearling.load(folder + "/half").num_parameters() < model.num_parameters())
"""
    done = python(code, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("True")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["prune", "--help"], 0),
        ([], 2),
        (["no-such-command"], 2),
        (["prune", "--no-such-option"], 2),
        (["prune"], 2),
        (["prune", "somewhere", "--samples", "0"], 2),
        (["prune", "somewhere", "--data", "x.jsonl", "--flops", "0.5"], 2),
        (["prune", "somewhere", "--data", "x.jsonl", "--flops", "1.5", "--dry-run"], 2),
    ],
)
def test_exit_codes(arguments: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == code
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    if code == 2 and arguments:
        assert said.err.startswith("error: ")
        assert not said.out


def test_an_unforeseen_failure_is_one_line_unless_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from shearling.cli import app as commands

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("what nobody thought of")

    monkeypatch.setattr(commands, "app", broken)
    monkeypatch.delenv("SHEARLING_DEBUG", raising=False)
    assert run(["show", "x"]) == 1
    monkeypatch.setenv("SHEARLING_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(["show", "x"])


def test_python_dash_m_is_the_same_program() -> None:
    code = (
        "import runpy, sys; sys.argv = ['shearling', '--version']; runpy.run_module('shearling', run_name='__main__')"
    )
    done = python(code)
    assert done.stdout.strip() == f"shearling {shearling.__version__}"


def test_the_shell_completes_commands_and_options() -> None:
    def complete(words: str) -> str:
        line = {"_SHEARLING_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return python("from shearling.cli import main; main()", check=False, **line).stdout

    assert "prune" in complete("shearling pr").split()
    assert "--flops" in complete("shearling prune --fl").split()


def test_extras_and_requirements() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert needed == {"torch", "transformers", "safetensors", "numpy", "rich", "typer", "matplotlib", "jinja2"}
    assert set(project["optional-dependencies"]) >= EXTRAS
    assert "version" not in project, "the version is written in src/shearling/_version.py alone"


def built(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    if not found:
        pytest.skip("nothing is built here; `make build` does")
    return found[-1]


def test_the_wheel_ships_what_checkpoints_and_type_checkers_need() -> None:
    wheel = built("*.whl")
    assert wheel.name.startswith(f"shearling-{shearling.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    source = ROOT / "src"
    expected = {p.relative_to(source).as_posix() for p in (source / "shearling").rglob("*.py")}
    expected |= {p.relative_to(source).as_posix() for p in source.glob("shearling/report/templates/*")}
    assert expected | {"shearling/py.typed"} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    others = {name.split("/")[0] for name in inside} - {"shearling"}
    assert all(name.endswith(".dist-info") for name in others), others


def test_the_sdist_can_be_tested_and_built_from() -> None:
    with tarfile.open(built("*.tar.gz")) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "mkdocs.yml"}
    assert wanted | {"src/shearling/py.typed", "tests/tiny.py", "docs/method.md"} <= inside
