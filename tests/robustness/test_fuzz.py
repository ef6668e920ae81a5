"""Files that anyone may have changed: whatever stands in them, only our own errors come out.

`SHEARLING_FUZZ=2000 pytest tests/robustness/test_fuzz.py` tries that many changes of each file.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import lzma
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import shearling
from data.tiny import bert_config, bert_tokenizer
from latency.tables import table_of
from shearling.checkpoint.card import model_card
from shearling.checkpoint.load import read_record
from shearling.checkpoint.plan import read_plan
from shearling.checkpoint.pretrained import check_prunable, load_model
from shearling.cli import run
from shearling.data import encode, read_rows
from shearling.latency.table import check_fits
from shearling.models.structure import structure_of
from shearling.report.facts import facts_of
from shearling.report.page import model_page
from shearling.report.text import words
from tiny import batches_of, model_of

CASES = int(os.environ.get("SHEARLING_FUZZ", "0"))
NUMBERS = st.sampled_from([0, -1, 1, 3, 2**16, 2**31, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf")])
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["../../x", "/etc", "\0"]))
VALUES = st.recursive(
    LEAVES, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=5), v, max_size=3))
)


def tries(few: int) -> Any:
    """So many cases in the suite, as many as asked for in a run of its own."""
    return settings(
        max_examples=CASES or few,
        deadline=None,
        database=None,
        derandomize=not CASES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


@st.composite
def changed(draw: st.DrawFn, original: Any) -> Any:
    """The value with one to three places replaced, removed or added to."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        spots = places(value)[1:]
        if not spots:
            break
        *owners, last = draw(st.sampled_from(spots))
        owner = value
        for key in owners:
            owner = owner[key]
        action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "replace":
            owner[last] = draw(VALUES)
        elif action == "remove":
            del owner[last]
        elif isinstance(owner, dict):
            owner[draw(st.text(max_size=5))] = draw(VALUES)
        else:
            owner.append(draw(VALUES))
    return value


@pytest.fixture
def folder(pruned: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, to be changed."""
    return Path(shutil.copytree(pruned, tmp_path / "pruned"))


def survives(call: Callable[[], object]) -> None:
    """It works, or says why not."""
    with contextlib.suppress(shearling.InputError):
        call()


def test_the_record(folder: Path) -> None:
    path = folder / "shearling.json"
    original = path.read_text()

    @tries(60)
    @given(changed(json.loads(original)))
    def one(record: Any) -> None:
        path.write_text(json.dumps(record))

        def use() -> None:
            found = read_record(folder)
            assert words(facts_of(found))
            assert model_page(found, directory=str(folder))
            assert model_card(found)

        survives(use)

    one()
    path.write_text(json.dumps(json.loads(original) | {"layers": 3}))
    assert run(["show", str(folder)]) == 2
    path.write_text(original)
    assert run(["show", str(folder)]) == 0


def test_the_configuration(folder: Path) -> None:
    path = folder / "config.json"
    original = path.read_text()

    with_code = json.loads(original)  # as of a model whose class comes with it
    with_code["shearling"]["auto_map"] = {"AutoModelForSequenceClassification": "house.BertForSequenceClassification"}

    @tries(40)
    @given(st.one_of(changed(json.loads(original)), changed(with_code)))
    def one(config: Any) -> None:
        path.write_text(json.dumps(config))
        survives(lambda: shearling.load(folder))
        survives(lambda: load_model(str(folder), device="cpu"))

    one()
    path.write_text(original)
    shearling.load(folder)


def test_the_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    structure = structure_of(model_of("bert"))
    kept = [s.units // 2 for s in structure.sublayers]

    @tries(60)
    @given(changed(table_of(structure).to_json()))
    def one(record: Any) -> None:
        path.write_text(json.dumps(record))

        def use() -> None:
            table = shearling.load_table(path)
            check_fits(table, structure)
            assert table.predict(structure, kept) >= 0

        survives(use)

    one()


@tries(40)
@given(content=st.binary(max_size=40))
def test_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "shearling.json").write_bytes(content)
    survives(lambda: read_record(folder))
    survives(lambda: shearling.load_table(folder / "shearling.json"))
    (folder / "shearling.json").unlink()


@st.composite
def damaged(draw: st.DrawFn, original: bytes, upto: int | None = None) -> bytes:
    """The bytes with some of the first `upto` replaced, removed or repeated."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(upto or len(content), len(content)) - 1)))
        part = draw(st.one_of(st.binary(max_size=9), st.sampled_from([b"\0" * 8, b"\xff" * 8, b"{", b'"', b"9" * 20])))
        content[at : at + draw(st.sampled_from([0, 1, len(part), 200]))] = part
    return bytes(content)


def test_a_plan(tmp_path: Path) -> None:
    path, model, batches = tmp_path / "plan.safetensors", model_of("bert"), batches_of(2)
    shearling.measure(model, batches).save(path)
    original = path.read_bytes()
    header, tensors = read_plan(path)

    @tries(30)
    @given(changed(header))
    def facts(record: Any) -> None:
        path.write_bytes(save(tensors, metadata={"shearling": json.dumps(record)}))
        survives(lambda: shearling.load_plan(path, model, batches))

    @tries(30)
    @given(damaged(original))
    def content(raw: bytes) -> None:
        path.write_bytes(raw)
        survives(lambda: shearling.load_plan(path, model, batches))

    facts()
    content()
    path.write_bytes(original)
    shearling.load_plan(path, model, batches)


def test_the_weights(folder: Path) -> None:
    """A safetensors file begins with the length of its header, and the header says where every tensor lies."""
    path = folder / "model.safetensors"
    original = path.read_bytes()

    @tries(30)
    @given(damaged(original, upto=4000))
    def one(raw: bytes) -> None:
        path.write_bytes(raw)
        survives(lambda: shearling.load(folder))
        survives(lambda: load_model(str(folder), device="cpu"))

    one()
    path.write_bytes(original)
    shearling.load(folder)


def test_the_configuration_of_a_dense_model(dense: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "dense"))
    original = json.loads((folder / "config.json").read_text())

    @tries(30)
    @given(changed(original))
    def one(config: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        survives(lambda: check_prunable(str(folder)))
        survives(lambda: load_model(str(folder), device="cpu"))

    one()


ROW = st.dictionaries(st.sampled_from(["text", "label", "sentence1", "tokens", ""]), VALUES, max_size=3)
JSONL = st.lists(st.one_of(ROW, VALUES), max_size=4).map(
    lambda rows: "".join(json.dumps(r) + "\n" for r in rows).encode()
)
CSV = st.text(alphabet=st.sampled_from([*'text,label\n\r"\t ;a1', "\0", "é", "\ud7ff"]), max_size=60).map(str.encode)


@tries(60)
@given(
    content=st.one_of(JSONL, CSV, st.binary(max_size=60)),
    suffix=st.sampled_from(["jsonl", "json", "csv", "tsv", "txt"]),
    packed=st.sampled_from([None, None, "gz", "xz"]),
)
def test_rows(content: bytes, suffix: str, packed: str | None, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / f"rows.{suffix}{'.' + packed if packed else ''}"
    path.write_bytes({None: bytes, "gz": gzip.compress, "xz": lzma.compress}[packed](content))
    survives(lambda: encoded(read_rows(path)))


def test_rows_in_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a good film", "a bad film"] * 4, "label": [1, 0] * 4}), path)
    original = path.read_bytes()

    @tries(60)
    @given(damaged(original))
    def one(raw: bytes) -> None:
        path.write_bytes(raw)
        survives(lambda: encoded(read_rows(path)))

    one()
    path.write_bytes(original)
    assert encoded(read_rows(path))


def encoded(rows: Any) -> Any:
    """Batches of rows, with the labels there are."""
    return encode(rows, bert_tokenizer(), "classification", model_config=bert_config(), labels="optional")


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """No file of a few kilobytes makes a reader take a gigabyte."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, f"{grown >> 10} MiB"  # ru_maxrss is in KiB


SIZES = {
    "layers without end": {"num_hidden_layers": 2**31},
    "classes without end": {"num_labels": 2**31},
    "a vocabulary without end": {"vocab_size": 2**62},
    "nested": {"text_config": {"n_layer": 10**9}},
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_would_take_for_ever(folder: Path, name: str) -> None:
    path = folder / "config.json"
    original = path.read_text()
    path.write_text(json.dumps(json.loads(original) | SIZES[name]))
    with pytest.raises(shearling.CheckpointError, match="more than"):
        shearling.load(folder)
    (folder / "shearling.json").unlink()  # as a dense model
    with pytest.raises(shearling.ModelError, match="more than"):
        load_model(str(folder), device="cpu")
    path.write_text(original)
