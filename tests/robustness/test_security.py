"""No one is let in: no pickle is read or written, no foreign code runs unasked, our own file is the one we know."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shearling
from folders import rows_file
from shearling.checkpoint.pretrained import load_model
from shearling.cli import run
from tiny import batches_of, model_of

PACKAGE = Path(shearling.__file__).parent
# The file that every checkpoint carries. When you change it on purpose: see that the golden checkpoints still load
# (tests/robustness/test_golden.py), that new ones load where shearling is not installed (tests/checkpoint), and put
# the new digest here: sha256sum src/shearling/models/modeling_shearling.py
MODELING_SHA256 = "ab104ef26997bccd10e105867bd0ec45577937ad4edf317be8f280b8f7f5a6fb"
STANDARD = {"inspect", "pathlib", "typing"}  # of Python itself
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "eval", "exec", "compile", "os.system", "os.popen", "yaml.load"}


def imported(node: ast.AST) -> set[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def called(node: ast.AST) -> set[str]:
    """The name that an expression calls."""
    if not isinstance(node, ast.Call):
        return set()
    shell = {"shell=True"} if any(k.arg == "shell" for k in node.keywords) else set()
    return {ast.unparse(node.func)} | shell


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_source_reads_no_pickle_and_runs_no_text(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert not FORBIDDEN_MODULES & {name for node in nodes for name in imported(node)}
    assert not (FORBIDDEN_CALLS | {"shell=True"}) & {name for node in nodes for name in called(node)}


class Intruder:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("which", ["dense", "pruned"])
def test_a_pickle_is_refused_and_not_opened(
    which: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(which), tmp_path / "model"))
    torch.save({"classifier.weight": Intruder(tmp_path / "trace")}, folder / "pytorch_model.bin")
    load_model(str(folder), device="cpu")  # the safetensors beside it are fine
    (folder / "model.safetensors").unlink()
    rows = rows_file(tmp_path / "rows.jsonl")
    out = tmp_path / "out"
    assert run(["prune", str(folder), "--data", str(rows), "--flops", "0.5", "--out", str(out), "--device", "cpu"]) == 2
    assert "holds its weights as a pickle" in capsys.readouterr().err
    with pytest.raises(shearling.CheckpointError):
        shearling.load(folder)
    assert not out.exists()
    assert not (tmp_path / "trace").exists()


def test_no_pickle_is_written(pruned: Path) -> None:
    for path in pruned.rglob("*"):
        assert path.suffix in {".json", ".safetensors", ".py", ".md", ".txt"}, path
        assert path.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"), path


FOREIGN = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification
Path({trace!r}).mkdir(exist_ok=True)
class Config(BertConfig):
    model_type = "abacus"
class Model(BertForSequenceClassification):
    config_class = Config
"""


def test_foreign_code_runs_only_when_asked_for(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, trace = Path(shutil.copytree(dense, tmp_path / "model")), tmp_path / "trace"
    (folder / "foreign.py").write_text(FOREIGN.format(trace=str(trace)))
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "foreign.Config", "AutoModelForSequenceClassification": "foreign.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "abacus", "auto_map": names}))
    rows = rows_file(tmp_path / "rows.jsonl")
    command = ["prune", str(folder), "--data", str(rows), "--flops", "0.5", "--out", str(tmp_path / "out")]
    assert run([*command, "--device", "cpu"]) == 2
    assert not trace.exists()
    assert not (tmp_path / "out").exists()
    capsys.readouterr()


def test_a_checkpoint_brings_its_file_and_it_is_not_run(pruned: Path, tmp_path: Path) -> None:
    """With shearling installed, a changed modelling file in the folder has no say."""
    folder = Path(shutil.copytree(pruned, tmp_path / "model"))
    (folder / "modeling_shearling.py").write_text(f"import os; os.mkdir({str(tmp_path / 'trace')!r})")
    shearling.load(folder)
    load_model(str(folder), device="cpu")
    assert not (tmp_path / "trace").exists()


OWN_CLASS = """
from transformers import BertForSequenceClassification
class HouseForSequenceClassification(BertForSequenceClassification):
    pass
"""


def test_a_class_that_comes_with_the_model(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trusted, it loads through auto_map; the report says that foreign code ran."""
    folder, rows = Path(shutil.copytree(dense, tmp_path / "model")), rows_file(tmp_path / "rows.jsonl")
    (folder / "house.py").write_text(OWN_CLASS)
    config = json.loads((folder / "config.json").read_text())
    name = "HouseForSequenceClassification"
    own = {"architectures": [name], "auto_map": {"AutoModelForSequenceClassification": f"house.{name}"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    scored = ["evaluate", str(folder), "--data", str(rows), "--device", "cpu", "--json", "--quiet"]
    assert run(scored) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert run([*scored, "--trust-remote-code"]) == 0
    capsys.readouterr()
    options = ["--data", str(rows), "--flops", "0.5", "--device", "cpu", "--json", "--trust-remote-code"]
    assert run(["prune", str(folder), *options, "--dry-run"]) == 0
    assert any("custom code of the model" in w for w in json.loads(capsys.readouterr().out)["warnings"])


def test_trust_alone_is_not_foreign_code(dense: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl")
    command = ["prune", str(dense), "--data", str(rows), "--flops", "0.5", "--out", str(tmp_path / "out"), "--quiet"]
    assert run([*command, "--device", "cpu", "--trust-remote-code"]) == 0
    warnings = json.loads((tmp_path / "out" / "shearling.json").read_text())["warnings"]
    assert not any("custom code" in warning for warning in warnings)


def test_the_modelling_file_is_the_one_we_know(tmp_path: Path) -> None:
    ours = (PACKAGE / "models" / "modeling_shearling.py").read_bytes()
    assert hashlib.sha256(ours).hexdigest() == MODELING_SHA256, "read the note above MODELING_SHA256"
    assert len(ours) < 20_000
    for family in ("bert", "distilbert"):
        shearling.prune(model_of(family), batches_of(), flops=0.5).save(tmp_path / family)
        assert (tmp_path / family / "modeling_shearling.py").read_bytes() == ours


def test_the_modelling_file_needs_torch_and_transformers_alone() -> None:
    nodes = list(ast.walk(ast.parse((PACKAGE / "models" / "modeling_shearling.py").read_text())))
    assert {name for node in nodes for name in imported(node)} <= STANDARD | {"torch", "transformers"}
