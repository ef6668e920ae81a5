"""What is read from disk: complaints say where, what was found, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shearling import costs, schema
from shearling.engine import precision
from shearling.errors import CheckpointError, InputError, ModelError
from shearling.schema.rules import COUNT, TEXT, Rule, integer, mapping, number, one_of, or_none, record, several

RULES: dict[str, tuple[Rule, list[Any], list[Any]]] = {
    "number": (number("a share", 0, 1), [0.5, 1e-9], [0, 1, True, "1", float("nan"), float("inf"), 10**400, None]),
    "integer": (integer("a count", 0, 3), [0, 3], [-1, 4, 1.0, True, "1"]),
    "word": (one_of(("a", "b")), ["a"], ["c", 1, ["a"], {}]),
    "or none": (or_none(TEXT), [None, ""], [1]),
    "list": (several(COUNT, least=1, most=2), [[1], [1, 2]], [[], [1, 2, 3], [-1], "12", {"0": 1}]),
    "mapping": (mapping(COUNT, one_of(("x",))), [{}, {"x": 1}], [{"y": 1}, {"x": -1}, []]),
    "record": (record({"x": COUNT, "y?": TEXT}), [{"x": 1}, {"x": 1, "y": "", "z": 0}], [{}, {"x": 1, "y": 2}, 3]),
    "closed": (record({"x": COUNT}, closed=True), [{"x": 1}], [{"x": 1, "z": 0}]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    rule, good, bad = RULES[name]
    assert [rule(value) for value in good] == [None] * len(good)
    assert all(isinstance(rule(value), str) for value in bad)


def test_a_complaint_says_where_and_what() -> None:
    rule = record({"rows": several(record({"cost": mapping(number())}))})
    assert rule({"rows": [{"cost": {}}, {"cost": {"dense": "much"}}]}) == ".rows[1].cost.dense: 'much' is not a number"
    assert rule({}) == ": no field 'rows'"


def test_names_are_those_of_the_modules_that_own_them() -> None:
    assert schema.KINDS == costs.KINDS
    assert set(schema.DTYPES) == set(precision.DTYPES)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'"\\ud800"', b"[1]"])
def test_what_is_no_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.json is not a record that can be used: .*It was changed\."):
        schema.RECORD.read(tmp_path / "file.json")


def test_files_that_are_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot read the record .*No such file"):
        schema.RECORD.read(tmp_path / "file.json")
    (tmp_path / "file.json").write_text("{}" + " " * 2**20)
    with pytest.raises(CheckpointError, match="larger than 0 MiB"):
        schema.CONFIG.read(tmp_path / "file.json", most=2**19)


def config(**more: Any) -> dict[str, Any]:
    edits: dict[str, Any] = {"linear": {}, "attributes": {}, "bias_only": [], "hollow": {}}
    return {"shearling": {"version": 2, "edits": edits}, **more}


@pytest.mark.parametrize(
    "field",
    [
        {"rope_theta": 2.8e8}, {"rope_theta": 280_000_000}, {"rope_parameters": {"rope_theta": 5e9}},
        {"layer_norm_eps": 1e-5}, {"max_length": 10**9}, {"hidden_size": 2**20},
    ],
)  # fmt: skip
def test_large_numbers_that_are_no_sizes_are_let_through(field: dict[str, Any]) -> None:
    assert schema.PRUNED_CONFIG.rule(config(**field)) is None


@pytest.mark.parametrize(
    "field",
    [
        {"num_hidden_layers": 2**31}, {"num_labels": 2**31}, {"vocab_size": 2**62}, {"text_config": {"n_layer": 10**9}},
        {"conv_dim": [8, 2**40]}, {"max_position_embeddings": 2**30},
    ],
)  # fmt: skip
def test_sizes_without_end_are_refused(field: dict[str, Any]) -> None:
    found = schema.PRUNED_CONFIG.rule(config(**field))
    assert found is not None
    assert "is more than" in found


def test_a_message_ends_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps("no such thing"))
    kinds = [one for one in vars(schema).values() if isinstance(one, schema.Schema)]
    assert len(kinds) >= 8
    for one in kinds:
        with pytest.raises(InputError, match=f"not a {one.what}") as caught:
            one.read(tmp_path / "file")
        assert str(caught.value).endswith(one.remedy)


def test_sizes_of_a_dense_configuration(tmp_path: Path) -> None:
    """Absurd ones are refused; names of modules and labels are no sizes, however they are called."""
    fine = {
        "num_hidden_layers": 96, "intermediate_size": 28672, "vocab_size": 262144, "rope_theta": 500_000_000,
        "label2id": {"layer": 4000}, "max_position_embeddings": 1_048_576,
        "shearling": {"edits": {"linear": {"encoder.layer.1.intermediate.dense": [1168, 384]}}},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fine))
    assert schema.DENSE_CONFIG.read(path) == fine
    for name, value in (("num_hidden_layers", 2000), ("n_layer", 5000), ("hidden_size", 2**40)):
        path.write_text(json.dumps(fine | {name: value}))
        with pytest.raises(ModelError, match="is more than"):
            schema.DENSE_CONFIG.read(path)
