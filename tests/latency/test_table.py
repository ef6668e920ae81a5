"""What a table holds, what is cleaned up and what is not, and every way a file is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from latency.tables import table_of
from shearling.errors import TableError
from shearling.latency.fit import steadied, without_noise
from shearling.latency.table import check_fits, load_table
from shearling.models.structure import structure_of
from tiny import SMALL, model_of


def test_written_and_read_again(tmp_path: Path) -> None:
    table = table_of(structure_of(model_of("bert")))
    assert load_table(table.save(tmp_path / "t.json")) == table
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_straight_lines_between_what_was_timed() -> None:
    table = table_of(structure_of(model_of("bert")), filters={0: 0.0, 16: 1.0, 48: 2.0})
    curve = table.sublayers[1].curve()
    assert len(curve) == 49
    assert curve[8] == pytest.approx(0.5e-3)
    assert curve[32] == pytest.approx(1.5e-3)


def test_prediction_adds_up_and_is_exact_for_the_dense_model() -> None:
    structure = structure_of(model_of("bert"))
    table = table_of(structure)
    assert table.predict(structure, [4, 48, 4, 48]) == pytest.approx(table.whole)
    assert table.predict(structure, [0, 0, 0, 0]) == pytest.approx(table.fixed)


def test_the_slower_side_sets_the_pace() -> None:
    structure = structure_of(model_of("bert"))
    table = table_of(structure, launch=True)
    assert table.dense == pytest.approx(max(table.whole, table.whole_launch or 0))
    host_bound = table.predict(structure, [1, 8, 1, 8])
    assert table.fixed_launch is not None
    assert host_bound > table.fixed + sum(c[n] for c, n in zip(table.curves(structure), [1, 8, 1, 8], strict=True))


def test_plateaus_and_steps_stay_as_they_are() -> None:
    staircase = [0, 1, 1, 1, 3, 3, 3, 7]
    assert without_noise(staircase, [0.1] * 8).tolist() == staircase


def test_noise_goes_and_a_real_dip_stays() -> None:
    cleaned = without_noise([0, 1.0, 2.05, 2.0, 3.0], [0.05] * 5)
    assert cleaned.tolist() == pytest.approx([0, 1, 2.025, 2.025, 3])
    dip = [0, 1.0, 5.0, 2.0, 3.0]
    assert without_noise(dip, [0.05] * 5).tolist() == dip


def test_a_quiet_staircase_is_trusted_and_a_noisy_line_is_straightened() -> None:
    units = list(range(0, 130, 8))
    stairs = [float(-(-k // 32)) for k in units]
    assert steadied(units, stairs, [1e-3] * len(units)).tolist() == pytest.approx(stairs, abs=1e-3)

    line = np.array([0.1 * k for k in units])
    left = []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 1.0, len(units))
        noise[0] = 0
        steady = steadied(units, (line + noise).tolist(), [1.0] * len(units))
        assert steady[0] == 0
        left.append(np.abs(steady - line).mean() / np.abs(noise).mean())
    assert np.mean(left) < 0.6


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_with_much_noise_the_curve_never_falls_and_keeps_its_sum(values: list[float]) -> None:
    cleaned = without_noise(values, [100.0] * len(values))
    assert (np.diff(cleaned) >= -1e-9).all()
    assert cleaned.sum() == pytest.approx(sum(values))


def edited(path: str, value: Any) -> Any:
    """A change to the JSON: a path such as `sublayers.0.units`, and what to put there (... deletes)."""

    def change(record: dict[str, Any]) -> None:
        *owners, last = path.split(".")
        at: Any = record
        for owner in owners:
            at = at[int(owner)] if isinstance(at, list) else at[owner]
        if value is ...:
            del at[last]
        else:
            at[int(last) if isinstance(at, list) else last] = value

    return change


BROKEN = {
    "another format": edited("format", 99),
    "no whole": edited("whole", ...),
    "whole of zero": edited("whole", 0.0),
    "negative": edited("sublayers.0.seconds.1", -1e-3),
    "nan": edited("sublayers.0.seconds.1", float("nan")),
    "infinite": edited("sublayers.1.seconds.2", float("inf")),
    "huge": edited("sublayers.1.seconds.2", 1e12),
    "a word for a number": edited("sublayers.1.seconds.2", "fast"),
    "a bool for a number": edited("fixed", True),
    "counts that fall": edited("sublayers.0.units.2", 1),
    "counts that do not start at 0": edited("sublayers.0.units.0", 1),
    "a fraction of a unit": edited("sublayers.0.units.1", 1.5),
    "too few times": edited("sublayers.0.seconds", [0.0]),
    "no spread": edited("sublayers.0.spread", ...),
    "an unknown kind": edited("sublayers.0.kind", "neurons"),
    "fixed above whole": edited("fixed", 100.0),
    "sublayers that are not a list of objects": edited("sublayers.0", 3),
    "an unknown field": edited("colour", "red"),
    "an unknown dtype": edited("dtype", "float3"),
    "no batch": edited("batch_size", 0),
    "launch without its totals": edited("sublayers.0.launch", [0.0] * 5),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_refused_with_what_to_do(change: Any, tmp_path: Path) -> None:
    record = copy.deepcopy(table_of(structure_of(model_of("bert"))).to_json())
    change(record)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(TableError, match=r"table\.json.*shearling profile"):
        load_table(path)


def test_a_gpu_that_waits_for_its_host_is_told() -> None:
    structure = structure_of(model_of("bert"))
    table = replace(table_of(structure, launch=True), whole_launch=0.05, fixed_launch=0.02)
    assert (table.slower_side, table.floor) == ("launch", 0.02)
    assert "50 ms, of which 20 ms cannot be pruned" in str(table)
    assert "this GPU waits for the host" in str(table)
    assert "waits for the host" not in str(table_of(structure))


def test_a_restless_host_counts_where_it_sets_the_pace() -> None:
    structure = structure_of(model_of("bert"))
    calm = replace(table_of(structure, launch=True), whole_launch=0.05)
    restless = [replace(entry, launch_spread=entry.launch) for entry in calm.sublayers]
    assert calm.unrest == 0.0
    assert replace(calm, sublayers=restless).unrest == pytest.approx(1.0)
    assert replace(calm, sublayers=restless, whole_launch=1e-4).unrest == 0.0


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": 1}', b"null"])
def test_not_a_table_at_all(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(TableError, match="not a latency table"):
        load_table(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="Cannot read"):
        load_table(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (("roberta", {}), "bert model, this one is roberta"),
        (("bert", {"num_hidden_layers": 3}), "2 layers of 4 heads and 48 filters; this one has 3 layers"),
        (("bert", {"intermediate_size": 64}), "64 filters"),
        (("bert", {"hidden_size": 64}), "no times for the heads of layer 0"),
    ],
)
def test_another_model_is_refused(other: tuple[str, dict[str, int]], words: str) -> None:
    table = table_of(structure_of(model_of("bert")))
    model_type, changes = other
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(TableError, match=words):
        check_fits(table, structure_of(model))
