"""What a run will take is said before it begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from families import tiny_batches, tiny_model
from shearling.costs import sequence_lengths
from shearling.engine import memory
from shearling.engine.hooks import device_of
from shearling.engine.memory import cut_batches, logits_per_token
from shearling.estimate import estimate
from shearling.models.structure import structure_of
from shearling.pipeline import measure
from shearling.sample.read import sample_of
from shearling.target import Target
from tiny import model_of


def test_statistics_and_weights_are_counted_from_the_shapes() -> None:
    structure, sample = structure_of(model_of("bert")), sample_of(tiny_batches("bert"))
    found = estimate(structure, sample, sequence_lengths(structure, sample))
    assert found.statistics == 2 * 4 * (32**2 + 32**2 + 48**2 + 32**2)
    assert found.weights == 4 * sum(p.numel() for p in structure.model.parameters())
    assert found.memory > found.weights + found.statistics
    assert found.seconds is not None
    assert found.seconds > 0
    assert "statistics 0.0 GB" in str(found)


def test_more_examples_take_longer_and_a_smaller_budget_takes_less_memory() -> None:
    structure, sample = structure_of(tiny_model("llama")), sample_of(tiny_batches("llama", 8))
    lengths = sequence_lengths(structure, sample)
    few, many = (estimate(structure, s, lengths) for s in (sample.drawn(4, 0), sample))
    assert many.memory >= few.memory
    assert estimate(structure, sample, lengths, 0.5).memory <= many.memory


def test_what_may_be_enough_and_what_may_come_are_the_ends_of_a_range() -> None:
    structure, sample = structure_of(tiny_model("bert")), sample_of(tiny_batches("bert", 16))
    given = (structure, sample, sequence_lengths(structure, sample), 0.1)
    whole = estimate(*given)
    assert whole.seconds == whole.most_seconds
    assert "about" in str(whole)
    part = estimate(*given, first=1)
    assert part.seconds < part.most_seconds  # type: ignore[operator]
    assert part.memory >= whole.memory
    auto, asked, timed = (estimate(*given, polish=setting) for setting in ("auto", 2000, "600s"))  # type: ignore[arg-type]
    assert auto.seconds < auto.most_seconds  # type: ignore[operator]
    assert asked.seconds == asked.most_seconds > 2 * auto.most_seconds  # type: ignore[operator]
    assert timed.seconds > 600  # type: ignore[operator]
    assert auto.memory >= whole.memory
    large = replace(auto, seconds=20.0, most_seconds=50.0)
    assert str(large).startswith("estimate: 20 s to 50 s and ")


def test_no_polish_is_expected_where_a_cpu_does_none() -> None:
    structure, sample = structure_of(tiny_model("bert")), sample_of(tiny_batches("bert", 16))
    given = (structure, sample, sequence_lengths(structure, sample), 0.8)
    auto = estimate(*given, polish="auto")
    assert auto.seconds == auto.most_seconds


def test_a_run_says_what_it_will_take() -> None:
    told: list[str] = []

    class Watcher:
        def __call__(self, stage: str, done: int, total: int) -> None: ...

        def say(self, words: str) -> None:
            told.append(words)

    target = Target(flops=0.5)
    plan = measure(tiny_model("bert"), tiny_batches("bert"), watcher=Watcher(), target=target)
    pruned = plan.meet(target)
    assert told[0].startswith("estimate: about")
    assert pruned.report.to_json()["estimate"]["statistics"] > 0


def test_a_large_vocabulary_makes_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = tiny_model("llama"), sample_of(tiny_batches("llama", 4))
    assert logits_per_token(model) == 60
    assert logits_per_token(model_of("bert")) == 0
    monkeypatch.setitem(memory.LOGITS, "cpu", 60 * 24)
    batches = cut_batches(sample, device_of(model), backward=True, logits=60)
    assert max(batch.inputs["input_ids"].numel() for batch in batches) <= 24
    assert sum(map(len, batches)) == sample.examples
