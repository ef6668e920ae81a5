"""Two processes over gloo come to the result of one, and one of them writes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shearling
from shearling.distributed import add_up, on_first, rank_and_world
from tiny import batches_of, model_of

WORKER = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import shearling
from tiny import batches_of, model_of

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder = Path(sys.argv[1])
rank = dist.get_rank()
for method in ("surgeon", "paper"):
    pruned = shearling.prune(model_of("bert").double(), batches_of(5, 3), flops=0.5, method=method)
    state = {"kept": [k.tolist() for k in pruned.kept], "weights": pruned.model.state_dict()}
    torch.save(state, folder / f"{method}.{rank}.pt")
    pruned.save(folder / method)
try:
    pruned.save(folder / "paper")  # there already: both processes must be told
except shearling.OutputError as error:
    (folder / f"refused.{rank}").write_text(str(error))
try:
    shearling.prune(model_of("bert"), batches_of(1, 1), flops=0.5)  # one example for two processes
except shearling.DataError as error:
    (folder / f"few.{rank}").write_text(str(error))
plan = shearling.measure(model_of("bert").double(), batches_of(5, 3))
plan.save(folder / "plan.safetensors")
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind."""
    folder = tmp_path_factory.mktemp("two")
    port = str(free_port())
    paths = os.pathsep.join(str(p) for p in (Path(shearling.__file__).parents[1], Path(__file__).parent))
    workers = []
    for rank in range(2):
        setting = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **setting, "MASTER_PORT": port, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-c", WORKER, str(folder)]
        workers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=240)
            assert worker.returncode == 0, errors[-3000:]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
    return folder


@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_two_processes_equal_one(folder: Path, method: str) -> None:
    alone = shearling.prune(model_of("bert").double(), batches_of(5, 3), flops=0.5, method=method)
    expected = alone.model.state_dict()
    for rank in range(2):
        state = torch.load(folder / f"{method}.{rank}.pt")
        assert state["kept"] == [k.tolist() for k in alone.kept]
        assert state["weights"].keys() == expected.keys()
        for name, value in state["weights"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_the_ranks_agree_to_the_bit_and_one_writes(folder: Path, method: str) -> None:
    first, second = (torch.load(folder / f"{method}.{rank}.pt")["weights"] for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    saved = shearling.load(folder / method).state_dict()
    assert all(torch.equal(saved[name], first[name]) for name in first)
    assert not [p for p in folder.iterdir() if p.name.endswith((".part", ".old"))]


def test_what_fails_for_one_fails_for_all(folder: Path) -> None:
    for rank in range(2):
        assert "not empty" in (folder / f"refused.{rank}").read_text()
        assert "1 examples for 2 processes" in (folder / f"few.{rank}").read_text()


def test_a_plan_measured_by_two_serves_one(folder: Path) -> None:
    plan = shearling.load_plan(folder / "plan.safetensors", model_of("bert").double(), batches_of(5, 3))
    alone = shearling.prune(model_of("bert").double(), batches_of(5, 3), flops=0.5)
    assert [k.tolist() for k in plan.prune(flops=0.5).kept] == [k.tolist() for k in alone.kept]


def test_one_process_needs_no_group() -> None:
    assert rank_and_world() == (0, 1)
    tensor = torch.ones(2)
    add_up([tensor])
    assert tensor.tolist() == [1, 1]
    done: list[int] = []
    on_first(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        on_first(lambda: 1 / 0)
