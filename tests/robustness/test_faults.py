"""What can happen in the middle: a kill, Ctrl-C, a full disk, no memory, a lost process. Nothing is left half-done."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import shearling
from folders import rows_file
from shearling.checkpoint.pretrained import load_model
from shearling.cli import run
from shearling.files import whole_directory
from tiny import batches_of, model_of
from warm import python

ROOT = Path(__file__).parents[2]
SOURCES = str(Path(shearling.__file__).parents[1])
ENVIRONMENT = {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def small() -> shearling.Pruned:
    return shearling.prune(model_of("bert"), batches_of(), flops=0.5)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_killed_and_interrupted_at_random_moments() -> None:
    """Two kills and a Ctrl-C of each; `scripts/kill_test.py` alone does 50 kills, and those of export, a slow one."""
    kinds = ["prune", "sweep", "profile", "retrain", "evaluate"]
    options = ["--rounds", "2", "--interrupts", "1", "--only", ",".join(kinds)]
    script = ROOT / "scripts" / "kill_test.py"
    result = python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", *options)
    assert result.returncode == 0, result.stderr[-2000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert list(seen) == kinds


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_in_rust(*args: Any, **kwargs: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


MOMENTS: dict[str, tuple[str, Callable[..., None]]] = {
    "weights": ("transformers.modeling_utils.safe_save_file", no_space_in_rust),
    "tokenizer": ("shearling.checkpoint.pruned.write_companions", no_space),
    "card": ("shearling.checkpoint.pruned.model_card", no_space),
    "flush": ("shearling.files.os.fsync", no_space),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_disk_fills_up(
    small: shearling.Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    small.save(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(*MOMENTS[moment])
    for target, force in ((tmp_path / "out", True), (tmp_path / "new", False)):
        with pytest.raises(shearling.OutputError, match=r"No space left on device.*Nothing was left behind"):
            small.save(target, force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no new folder, no hidden one
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_is_swapped_from_any_thread(tmp_path: Path) -> None:
    """Signals are only held back in the main thread; the others may not even try."""

    def write() -> None:
        with whole_directory(tmp_path / "out") as folder:
            (folder / "file").write_text("whole")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "out" / "file").read_text() == "whole"


def short_of_memory(model: Any, most: int, error: type[Exception]) -> Any:
    """The model, on a device where batches of more than `most` do not fit while gradients are kept."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > most:
            raise error("DefaultCPUAllocator: can't allocate memory")

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_batches_are_halved_until_they_fit(
    method: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    model = short_of_memory(model_of("bert").double(), 4, error)
    pruned = shearling.prune(model, batches_of(2, 16), flops=0.5, method=method)
    alone = shearling.prune(model_of("bert").double(), batches_of(2, 16), flops=0.5, method=method)
    assert [k.tolist() for k in pruned.kept] == [k.tolist() for k in alone.kept]
    assert "Out of memory with batches of 32; going on with half of that." in caplog.text


def test_not_one_example_fits(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        return short_of_memory(load_model(*args, **kwargs), 0, torch.OutOfMemoryError)

    monkeypatch.setattr("shearling.workflows.source.load_model", load)
    rows = rows_file(tmp_path / "rows.jsonl")
    command = ["prune", str(dense), "--data", str(rows), "--flops", "0.5", "--out", str(tmp_path / "out"), "--json"]
    assert run([*command, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: A single example does not fit into memory" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_another_error_is_not_taken_for_one_of_memory() -> None:
    model = model_of("bert")

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("shapes do not fit")

    model.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        shearling.prune(model, batches_of(2, 16), flops=0.5)


@pytest.mark.parametrize("stage", ["measure", "refit", "check"])
def test_ctrl_c_leaves_the_callers_model_alone(stage: str) -> None:
    model = model_of("bert").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def watcher(name: str, done: int, total: int) -> None:
        if name == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shearling.prune(model, batches_of(), flops=0.5, progress=watcher)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


LOST = """
import os
from shearling.cli import main
import shearling.methods.surgeon
if os.environ["RANK"] == "1":
    def die(*args, **kwargs):
        os._exit(9)
    shearling.methods.surgeon.Surgeon.repair = die
main()
"""


def launched(*arguments: str) -> CompletedProcess[str]:
    """Two processes, started by torchrun's own program."""
    launcher = "import runpy; runpy.run_module('torch.distributed.run', run_name='__main__')"
    return python(launcher, "--standalone", "--nproc_per_node", "2", *arguments, **ENVIRONMENT)


@pytest.mark.slow
def test_torchrun_shares_the_work(dense: Path, tmp_path: Path) -> None:
    command = ["prune", str(dense), "--data", str(rows_file(tmp_path / "rows.jsonl")), "--flops", "0.5"]
    out = tmp_path / "out"
    result = launched("-m", "shearling", *command, "--out", str(out), "--json", "--dtype", "float64")
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads(result.stdout)  # one object, though there are two processes
    assert run([*command, "--out", str(tmp_path / "alone"), "--dtype", "float64", "--quiet"]) == 0
    alone = json.loads((tmp_path / "alone" / "shearling.json").read_text())
    assert record["layers"] == alone["layers"]
    assert json.loads((out / "shearling.json").read_text())["kept"] == alone["kept"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run(dense: Path, tmp_path: Path) -> None:
    rows, script = rows_file(tmp_path / "rows.jsonl"), tmp_path / "lost.py"
    script.write_text(LOST)
    command = ["prune", str(dense), "--data", str(rows), "--flops", "0.5", "--out", str(tmp_path / "out")]
    result = launched(str(script), *command)
    assert result.returncode != 0
    assert "exitcode  : 9" in result.stderr  # the launcher tells which one died, the others that one is lost
    assert "--help" not in result.stderr
    assert result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost.py", "rows.jsonl"]
