"""What a record says: rows, intervals and notes, worked out once."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shearling.report.facts import count, facts_of_comparison, faster, interval, notes_of, scores_of, short

DROPPED = "the refit did not carry over to the held-out examples and was dropped"


def record_with(repairs: list[tuple[str, str]], left: list[dict[str, int]]) -> dict[str, Any]:
    return {
        "repairs": [{"sublayer": name, "note": note} for name, note in repairs],
        "layers": left, "dense_layers": [{"heads": 4, "filters": 8}] * len(left), "warnings": ["few examples"],
    }  # fmt: skip


def test_repeated_notes_are_gathered() -> None:
    names = ["heads of layer 0", "filters of layer 0", "heads of layer 1", "filters of layer 1"]
    record = record_with(
        [(name, DROPPED if i else "") for i, name in enumerate(names)], [{"heads": 1, "filters": 1}] * 2
    )
    assert notes_of(record) == ["few examples", f"in 3 of 4 sublayers, {DROPPED}"]


def test_sublayers_that_lost_nothing_are_not_mentioned() -> None:
    repairs = [("heads of layer 0", DROPPED), ("filters of layer 0", DROPPED)]
    record = record_with(repairs, [{"heads": 4, "filters": 5}])
    assert notes_of(record) == ["few examples", f"filters of layer 0: {DROPPED}"]
    assert notes_of(record_with(repairs, [{"heads": 4, "filters": 8}])) == ["few examples"]


def test_a_name_that_two_stacks_share_is_not_taken_for_one_of_them() -> None:
    record = record_with([("heads of layer 0", DROPPED)] * 2, [{"heads": 4, "filters": 8}, {"heads": 1, "filters": 8}])
    assert notes_of(record)[1] == f"in 2 of 2 sublayers, {DROPPED}"


@given(st.floats(1, 99), st.integers(5, 10**6))
def test_an_interval_holds_its_value_and_shrinks_with_the_examples(value: float, examples: int) -> None:
    for metric in ("accuracy", "spearman"):
        low, high = interval(metric, value, examples) or (math.nan, math.nan)
        assert 0 - 100 * (metric == "spearman") <= low < value < high <= 100
        more = interval(metric, value, 4 * examples) or (math.nan, math.nan)
        assert more[1] - more[0] < high - low


def test_wilsons_interval_is_the_one_of_the_books() -> None:
    low, high = interval("accuracy", 50.0, 100) or (0, 0)
    assert (low, high) == (pytest.approx(40.38, abs=0.01), pytest.approx(59.62, abs=0.01))
    assert interval("perplexity", 20.0, 100) is None
    assert interval("spearman", 100.0, 100) is None


def test_the_latest_score_of_a_task_counts() -> None:
    here = {"task": "sst2", "metric": "accuracy", "dense": 92.0, "pruned": 90.0, "examples": 8}
    later = {"task": "sst2", "metric": "accuracy", "value": 91.0, "examples": 80}
    assert scores_of({"evaluation": here})[0]["value"] == 90.0
    assert scores_of({"evaluation": here, "evaluations": [later]}) == [later]
    drop = {"metric": "accuracy", "dense": 92.0, "value": 91.5, "examples": 80, "tried": []}
    assert scores_of({"max_drop": drop})[0] | drop == drop | {"task": ""}
    assert scores_of({"max_drop": drop, "evaluations": [later]}) == [later]


def test_two_models_side_by_side() -> None:
    one = {"model": "models/dense/", "value": 90.0, "em": None, "bytes": 10_000_000, "params": 2_500_000, "macs": 10**9,
           "milliseconds": 20.0, "spread": 0.1, "batch": [4, 8]}  # fmt: skip
    other = one | {"model": "small", "value": None, "bytes": 5_000_000, "milliseconds": 10.0}
    found = {"task": "sst2", "metric": "accuracy", "examples": 64, "device": "a CPU", "batch": [4, 8],
             "agreement": {"measure": "cosine", "value": 99.0, "count": 64}}  # fmt: skip
    facts = facts_of_comparison(found | {"models": [one, other]})
    assert facts.columns == ("dense", "small")
    assert [row.name for row in facts.rows][:2] == ["agreement with dense", "latency, 4 x 8"]
    assert facts.rows[1].change == "2.00x faster"
    scored = facts_of_comparison(found | {"models": [one, other | {"value": 89.0}], "agreement": None})
    assert scored.rows[0].change == "-1.00"
    assert scored.notes


def test_numbers_as_people_read_them() -> None:
    assert [short(v) for v in (0, 12, 1234, 2.5e6, 3e9, 4e12)] == ["0", "12", "1.23K", "2.5M", "3G", "4T"]
    assert [count(n, "thread") for n in (0, 1, 2000)] == ["0 threads", "1 thread", "2,000 threads"]
    assert count(2, "pass") == "2 passes"
    assert (faster(0.5), faster(1.25)) == ("2.00x faster", "1.25x slower")
