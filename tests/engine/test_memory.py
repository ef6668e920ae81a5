"""Batches that fit, and smaller ones when they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from shearling.engine import memory
from shearling.engine.memory import BACKWARD_TOKENS, batches_that_fit, cut_batches
from shearling.errors import DataError, ShearlingError
from shearling.sample.batch import Batch
from shearling.sample.read import sample_of
from tiny import batches_of

T = TypeVar("T")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKWARD_TOKENS, "cpu", 96)


def test_batches_have_at_most_so_many_tokens() -> None:
    batches = cut_batches(sample_of(batches_of(4, 8)), CPU, backward=True)
    assert sum(map(len, batches)) == 32
    assert all(batch.inputs["input_ids"].numel() <= 96 for batch in batches)


def run(stage: Callable[[Sequence[Batch]], T], batches: Sequence[Any]) -> T:
    """A stage over as many attempts as it takes."""
    for attempt in batches_that_fit(sample_of(batches), CPU, backward=True, sums=True):
        with attempt as cut:
            found = stage(cut)
    return found


def fail(batches: Sequence[Batch]) -> None:
    raise torch.OutOfMemoryError


def test_memory_that_runs_out_halves_the_batches() -> None:
    sizes: list[int] = []

    def stage(batches: Sequence[Batch]) -> int:
        sizes.append(max(batch.inputs["input_ids"].numel() for batch in batches))
        if sizes[-1] > 30:
            raise torch.OutOfMemoryError
        return sum(map(len, batches))

    assert run(stage, batches_of(2, 8)) == 16
    assert len(sizes) == 3
    assert sizes[0] <= 96
    assert sizes[1] <= 48
    assert sizes[2] <= 24


def test_not_even_one_example_fits() -> None:
    with pytest.raises(DataError, match="single example"):
        run(fail, batches_of(2, 8))


def test_other_errors_are_not_taken_for_it() -> None:
    def stage(batches: Sequence[Batch]) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        run(stage, batches_of(1))


def test_a_process_among_others_does_not_start_over_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "rank_and_world", lambda: (1, 2))
    with pytest.raises(ShearlingError, match=r"batches of \d+.*max_length"):
        run(fail, batches_of(2, 8))


def test_memory_that_the_allocator_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a training in the same process, the driver knows of nothing that is free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert memory.free_bytes(torch.device("cuda")) == 60
