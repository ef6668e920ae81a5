"""A measurement on disk prunes like the one it was saved from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shearling
from bench import write_model
from shearling.errors import CheckpointError, OutputError
from tiny import batches_of, model_of


@pytest.fixture(scope="module")
def plan() -> shearling.Plan:
    torch.set_num_threads(1)
    method = shearling.Surgeon(ridge=0.3, realign=False)
    return shearling.measure(model_of("bert"), batches_of(), method=method, samples=10, seed=3)


def same(a: shearling.Pruned, b: shearling.Pruned) -> bool:
    mine, theirs = a.model.state_dict(), b.model.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_saved_and_loaded(plan: shearling.Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "new" / "plan.safetensors")
    loaded = shearling.load_plan(path, model_of("bert"), batches_of())
    assert loaded.method == plan.method
    assert loaded.seed == plan.seed
    assert loaded.sample.examples == 10
    assert loaded.warnings == plan.warnings  # it is the same sample
    for ratio in (0.7, 0.3):
        assert same(loaded.prune(flops=ratio), plan.prune(flops=ratio))
    assert [p.name for p in path.parent.iterdir()] == ["plan.safetensors"]


def test_other_batches_of_the_same_examples_are_the_same_sample(tmp_path: Path) -> None:
    plan = shearling.measure(model_of("bert"), batches_of())
    single = [{k: v[i : i + 1] for k, v in batch.items()} for batch in batches_of() for i in range(4)]
    loaded = shearling.load_plan(plan.save(tmp_path / "plan"), model_of("bert"), single)
    assert loaded.warnings == plan.warnings


def test_texts_are_taken_as_they_were_when_measuring(tmp_path: Path) -> None:
    rows = [{"sentence": f"word{i % 7} word{i % 5} word{i % 3}"} for i in range(40)]
    model = str(write_model(tmp_path / "model"))
    plan = shearling.measure(model, rows, samples=20, seed=3, progress=False)
    loaded = shearling.load_plan(plan.save(tmp_path / "plan"), model, rows, progress=False)
    assert loaded.warnings == plan.warnings  # the same sample
    assert same(loaded.prune(flops=0.5), plan.prune(flops=0.5))


def test_another_sample_is_noted(plan: shearling.Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan")
    loaded = shearling.load_plan(path, model_of("bert"), batches_of(seed=1))
    assert "another sample" in loaded.warnings[-1]


def test_other_weights_of_the_same_shapes_are_refused(plan: shearling.Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan")
    with pytest.raises(CheckpointError, match="same shapes, other weights"):
        shearling.load_plan(path, model_of("bert", seed=1), batches_of())


def test_another_model_is_refused(plan: shearling.Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan")
    with pytest.raises(CheckpointError, match="another model"):
        shearling.load_plan(path, shearling.prune(model_of("bert"), batches_of(), flops=0.5).model, batches_of())


def test_what_is_no_plan(plan: shearling.Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan")
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["shearling"])

    def write(tensors: dict[str, torch.Tensor], header: object) -> None:
        save_file(tensors, path, metadata={"shearling": json.dumps(header)})

    damaged = [
        (tensors | {"0.removed": torch.tensor([0, 0, 1, 2])}, header),
        (tensors | {"0.error": torch.full((5,), float("nan"), dtype=torch.float64)}, header),
        ({k: v for k, v in tensors.items() if k != "1.error"}, header),
        (tensors, {k: v for k, v in header.items() if k != "method"}),
        (tensors, header | {"method": {"unknown": 1}}),
        (tensors, [1]),
    ]
    for content, head in damaged:
        write(content, head)
        with pytest.raises(CheckpointError):
            shearling.load_plan(path, model_of("bert"), batches_of())
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a plan"):
        shearling.load_plan(path, model_of("bert"), batches_of())
    with pytest.raises(CheckpointError, match="not a plan"):
        shearling.load_plan(tmp_path / "gone", model_of("bert"), batches_of())


def test_plans_of_both_methods_are_saved(tmp_path: Path) -> None:
    model, batches = model_of("bert"), batches_of()
    for method in ("surgeon", "paper"):
        plan = shearling.measure(model, batches, method=method)
        loaded = shearling.load_plan(plan.save(tmp_path / method), model, batches)
        before, after = (one.prune(flops=0.5) for one in (plan, loaded))
        assert all(torch.equal(a, b) for a, b in zip(before.kept, after.kept, strict=True))
        assert loaded.method == plan.method


def test_a_place_that_cannot_be_written_to(plan: shearling.Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "plan", tmp_path / "folder"):
        with pytest.raises(OutputError, match=f"Cannot write {place}: .*directory|exists"):
            plan.save(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
