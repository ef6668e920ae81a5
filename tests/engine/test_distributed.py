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
from shearling.engine import distributed
from shearling.engine.distributed import add_up, agree, dealt, fail_together, gathered, on_first, rank_and_world
from tiny import batches_of, model_of
from warm import start

WORKER = """
import os
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import shearling
from tiny import batches_of, model_of

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder = Path(sys.argv[1])
rank = dist.get_rank()
methods = {"surgeon": shearling.Surgeon(), "paper": shearling.Paper(), "guarded": shearling.Paper(guarded=True)}
for method, given in methods.items():
    pruned = shearling.prune(model_of("bert").double(), batches_of(5, 3), flops=0.5, method=given)
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
rows = [{name: values[i] for name, values in batch.items()} for batch in batches_of(5, 3) for i in range(3)]
callback = shearling.PruneOnTrainEnd(flops=0.5, out=folder / "trained")
args, state = SimpleNamespace(per_device_train_batch_size=3), SimpleNamespace(is_world_process_zero=rank == 0)
callback.on_train_end(args, state, None, model=model_of("bert"), train_dataloader=DataLoader(rows))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch's threads may abort a process that ends while the other is still closing
"""


FAILING = """
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import shearling
import shearling.latency.meet
import shearling.methods.surgeon
from latency.tables import table_of
from shearling.models.structure import structure_of
from tiny import batches_of, model_of

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
folder, rank = Path(sys.argv[1]), dist.get_rank()
model, batches = model_of("bert"), batches_of(5, 3)

def attempt(name, work):
    try:
        work()
        (folder / f"{name}.{rank}").write_text("done")
    except Exception as error:
        (folder / f"{name}.{rank}").write_text(f"{type(error).__name__}: {error}")
    together = torch.ones(1)
    dist.all_reduce(together)  # nobody is left behind in an exchange of before
    assert together.item() == 2

def broken(*args, **kwargs):
    raise KeyError("the disk is on fire")

def with_broken(owner, name, where, work):
    kept = getattr(owner, name)
    if rank == where:
        setattr(owner, name, broken)
    try:
        work()
    finally:
        setattr(owner, name, kept)

prune = lambda **options: shearling.prune(model, batches, **{"flops": 0.5, **options})
attempt("order", lambda: with_broken(shearling.methods.surgeon, "order", 1, prune))
attempt("repair", lambda: with_broken(shearling.Surgeon, "repair", 1, prune))
table = table_of(structure_of(model))
timed = lambda: prune(flops=None, latency=0.7, table=table)
attempt("timing", lambda: with_broken(shearling.latency.meet, "in_turns", 0, timed))
attempt("impossible", lambda: prune(flops=1e-9))  # alike for both
callback = shearling.PruneOnTrainEnd(flops=0.5, out=folder / "trained")
rows = [{name: values[i] for name, values in batch.items()} for batch in batches for i in range(3)]
loader = DataLoader(rows, collate_fn=broken if rank == 1 else None)
args, state = SimpleNamespace(per_device_train_batch_size=3), SimpleNamespace(is_world_process_zero=rank == 0)
attempt("callback", lambda: callback.on_train_end(args, state, None, model=model, train_dataloader=loader))
(folder / f"error.{rank}").write_text(str(callback.error))
attempt("whole", prune)
dist.destroy_process_group()
os._exit(0)  # torch's threads may abort a process that ends while the other is still closing
"""


GROUP_FIRST = """
import sys
import weakref
import torch.distributed as dist
import shearling

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
assert "transformers" not in sys.modules
assert shearling.prune  # imports transformers, which imports FSDP
assert "torch.distributed.nn.functional" in sys.modules
dist.destroy_process_group()
assert group() is None, "what is left of the group keeps gloo's threads alive"
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_two(folder: Path, script: str = WORKER) -> None:
    """Two processes, started as `torchrun` would."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        start(script, str(folder), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **place) for rank in range(2)
    ]
    for done in [worker.end() for worker in workers]:
        assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_equal_one(tmp_path: Path) -> None:
    run_two(tmp_path)
    methods = {"surgeon": shearling.Surgeon(), "paper": shearling.Paper(), "guarded": shearling.Paper(guarded=True)}
    for method, given in methods.items():
        alone = shearling.prune(model_of("bert").double(), batches_of(5, 3), flops=0.5, method=given)
        expected = alone.model.state_dict()
        first, second = (torch.load(tmp_path / f"{method}.{rank}.pt") for rank in range(2))
        assert first["kept"] == second["kept"] == [k.tolist() for k in alone.kept]
        assert first["weights"].keys() == expected.keys()
        saved = shearling.load(tmp_path / method).state_dict()
        for name, value in first["weights"].items():
            assert torch.equal(second["weights"][name], value)  # the ranks agree to the bit
            assert torch.equal(saved[name], value)
            torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9)
    assert not [p for p in tmp_path.iterdir() if p.name.endswith((".part", ".old"))]

    for rank in range(2):  # what fails for one fails for all
        assert "not empty" in (tmp_path / f"refused.{rank}").read_text()
        assert "1 examples for 2 processes" in (tmp_path / f"few.{rank}").read_text()

    assert shearling.load(tmp_path / "trained").config.model_type == "bert"  # written by one, at the end of training
    plan = shearling.load_plan(tmp_path / "plan.safetensors", model_of("bert").double(), batches_of(5, 3))
    alone = shearling.prune(model_of("bert").double(), batches_of(5, 3), flops=0.5)
    assert [k.tolist() for k in plan.prune(flops=0.5).kept] == [k.tolist() for k in alone.kept]


def test_a_group_that_is_there_first_ends_when_it_is_destroyed() -> None:
    """Gloo's threads end with the group; one that still frees a tensor while Python shuts down aborts the process."""
    paths = os.pathsep.join([str(Path(shearling.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    home = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(  # a fresh Python: those of `start` have imported transformers
        [sys.executable, "-c", GROUP_FIRST], env=home, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_where_one_process_fails_the_other_does_not_wait(tmp_path: Path) -> None:
    run_two(tmp_path, FAILING)

    def said(name: str) -> tuple[str, str]:
        first, second = ((tmp_path / f"{name}.{rank}").read_text() for rank in range(2))
        return first, second

    for name in ("order", "repair"):
        first, second = said(name)
        assert "Process 1 of 2 failed" in first
        assert "the disk is on fire" in first
        assert second == "KeyError: 'the disk is on fire'"
    assert said("timing") == ("KeyError: 'the disk is on fire'",) * 2  # measured by one, for both
    assert all(words.startswith("ConstraintError") for words in said("impossible"))
    assert said("callback") == ("done", "done")  # the training goes on
    assert all("the disk is on fire" in words for words in said("error"))
    assert not (tmp_path / "trained").exists()
    assert said("whole") == ("done", "done")


def test_one_process_needs_no_group() -> None:
    assert rank_and_world() == (0, 1)
    tensor = torch.ones(2)
    add_up([tensor])
    assert tensor.tolist() == [1, 1]
    assert on_first(lambda: 7) == 7
    with fail_together():
        agree()
    with pytest.raises(ZeroDivisionError):
        on_first(lambda: 1 / 0)
    assert dealt([3, 5, 4]) == [0, 1, 2]
    assert gathered({1: "a"}) == {1: "a"}


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_work_is_dealt_out_once_and_evenly(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [9, 100, 9, 100, 9, 100, 9, 100]  # attention and FFN, layer by layer
    shares = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank_and_world", lambda rank=rank: (rank, world))
        shares.append(dealt(sizes))
    assert sorted(i for share in shares for i in share) == list(range(8))
    loads = [sum(sizes[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= 100
