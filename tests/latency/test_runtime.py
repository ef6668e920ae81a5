"""Runs as they are and runs that were recorded; the recorder itself needs a GPU and is replaced here."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from shearling.errors import InputError
from shearling.latency import timing as module
from shearling.latency.timing import runner
from shearling.models.structure import structure_of
from tiny import batches_of, inputs_of, model_of


class Recorder:
    """What a CUDA graph does, as far as anyone can tell from outside."""

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self.step, self.replays = step, 0

    def replay(self) -> None:
        self.replays += 1


def test_eager_is_the_model_itself() -> None:
    model, example = model_of("bert").eval(), inputs_of(batches_of(1)[0])
    assert torch.equal(runner(model, example, "eager")().logits, model(**example).logits)  # type: ignore[attr-defined]


def test_graphs_are_recorded_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []

    def recorded(step: Callable[[], object], device: torch.device) -> Recorder:
        made.append(Recorder(step, device))
        return made[-1]

    monkeypatch.setattr(module, "recorded", recorded)
    run = runner(model_of("bert"), inputs_of(batches_of(1)[0]), "graphs")
    for _ in range(3):
        run()
    (graph,) = made
    assert graph.replays == 3
    step = weakref.ref(graph.step)
    graph.step = None  # type: ignore[assignment]
    del graph, made[:]
    gc.collect()
    assert step() is not None  # alive as long as the runner


def test_a_model_that_cannot_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(step: Callable[[], object], device: torch.device) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(module, "recorded", recorded)
    with pytest.raises(InputError, match=r"BertFor\w+ cannot be recorded as a CUDA graph \(CUDA error: operation"):
        runner(model_of("bert"), inputs_of(batches_of(1)[0]), "graphs")


def test_the_shares_of_the_layers() -> None:
    """A layer that sleeps takes most of the time; hooks are gone afterwards."""
    model = model_of("bert").eval()
    structure, example = structure_of(model), inputs_of(batches_of(1)[0])
    first, second = structure.stacks[0].layers
    handle = second.register_forward_hook(lambda module, args, output: time.sleep(0.05))
    shares = module.layer_shares(structure, partial(model, **example), torch.device("cpu"), rounds=3)
    handle.remove()
    assert len(shares) == 2
    assert 0 < shares[0] < shares[1]
    assert shares[1] > 0.5
    assert sum(shares) < 1
    assert not first._forward_hooks
    assert not second._forward_pre_hooks
