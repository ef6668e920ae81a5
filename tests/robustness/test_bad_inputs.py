"""Whatever goes in, one message comes out: exit code 2, what to do, nothing written, no traceback."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import shearling
from data.tiny import bert_tokenizer
from robustness.places import WEIGHTS, Place, byte_edit, json_edit, lines, weight_edit
from shearling.cli import run
from tiny import batches_of, model_of
from warm import python

Case = tuple[Callable[[Place], list[str]], str]


@pytest.fixture
def place(tmp_path: Path, dense: Path, pruned: Path) -> Place:
    return Place(tmp_path, dense, pruned)


def rows(name: str, content: str | bytes, says: str, *options: object) -> Case:
    """Bad data."""
    return lambda place: place.command("--flops", 0.5, *options, data=place.rows(name, content)), says


def model(change: Callable[[Path], object], says: str, *options: object, of: str = "dense") -> Case:
    """A bad model."""
    return lambda place: place.command("--flops", 0.5, *options, model=place.model(change, of=of)), says


def asked(says: str, *options: object) -> Case:
    """A bad constraint or option."""
    return lambda place: place.command(*options), says


def table(change: Callable[[dict[str, Any]], object], says: str) -> Case:
    """A bad latency table."""
    return lambda place: place.command("--latency", 0.5, "--table", place.table(change)), says


def set_time(value: float) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["sublayers"][0]["seconds"].__setitem__(1, value)


LABELLED = ("--task", "classification", "--labels")
GOOD = '{"text": "a good film", "label": 1}\n'
SHAPES = "shearling"  # where config.json keeps them

DATA: dict[str, Case] = {
    "no file": (lambda p: p.command("--flops", 0.5, data=str(p.folder / "gone.jsonl")), "there is no file"),
    "a folder for a file": (lambda p: p.command("--flops", 0.5, data=str(p.folder)), str(Path())),
    "an empty file": rows("rows.jsonl", "", "no rows"),
    "blank lines": rows("rows.jsonl", "\n \n", "no rows"),
    "a header alone": rows("rows.csv", "text,label\n", "no rows"),
    "half an object": rows("rows.jsonl", GOOD + '{"text": "a go', "line 2"),
    "not objects": rows("rows.jsonl", "[1, 2]\n", "not an object"),
    "nested without end": rows("rows.jsonl", '{"text": ' + "[" * 100_000 + "\n", "plain values"),
    "a number of 5,000 digits": rows("rows.jsonl", '{"text": "a", "label": ' + "9" * 5000 + "}\n", "plain values"),
    "Latin-1": rows("rows.jsonl", '{"text": "café"}\n'.encode("latin-1"), "UTF-8"),
    "UTF-16": rows("rows.csv", "text,label\na,1\n".encode("utf-16"), "UTF-8"),
    "half a gzip": rows("rows.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "damaged"),
    "no parquet": rows("rows.parquet", b"PAR1 no", "parquet"),
    "no suffix": rows("rows", GOOD, "suffix"),
    "a pickle": rows("rows.pkl", b"\x80\x04.", "suffix"),
    "other columns halfway": rows("rows.jsonl", GOOD + '{"words": "a"}\n', "columns"),
    "too few cells": rows("rows.csv", "text,label\na\n", "cells"),
    "no column of text": rows("rows.jsonl", lines({"x": 1.5, "y": 2}), "column"),
    "a column that is not there": rows("rows.jsonl", GOOD, "words", "--text-columns", "words"),
    "a label column that is not there": rows("rows.jsonl", GOOD, "grade", *LABELLED, "--label-column", "grade"),
    "numbers for text": rows("rows.jsonl", lines({"text": "a", "label": 0}, {"text": 7, "label": 1}), "text"),
    "nothing for text": rows("rows.jsonl", lines({"text": "a", "label": 0}, {"text": None, "label": 1}), "text"),
    "labels of another task": rows("rows.jsonl", lines({"text": "a", "label": 7}), "7", *LABELLED),
    "negative labels": rows("rows.jsonl", lines({"text": "a", "label": -3}), "-3", *LABELLED),
    "names the model does not know": rows("rows.jsonl", lines({"text": "a", "label": "great"}), "great", *LABELLED),
    "names and numbers": rows(
        "rows.jsonl", lines({"text": "a", "label": "0x"}, {"text": "b", "label": 1}), "mixes", *LABELLED
    ),
    "labels that are NaN": rows("rows.jsonl", '{"text": "a", "label": NaN}\n', "must be a number", *LABELLED),
    "no label": rows("rows.jsonl", lines({"text": "a", "label": None}), "must be a number", *LABELLED),
    "a label past counting": rows("rows.jsonl", '{"text": "a", "label": 1' + "0" * 400 + "}\n", "number", *LABELLED),
    "no labels at all": rows("rows.jsonl", lines({"text": "a"}), "label", *LABELLED),
    "the wrong task": rows("rows.jsonl", GOOD, "question", "--task", "squad"),
    "a task that is none": rows("rows.jsonl", GOOD, "sst3", "--task", "sst3"),
    "no data": (lambda p: ["prune", str(p.dense), "--flops", "0.5", "--out", str(p.out)], "--data"),
}
MODELS: dict[str, Case] = {
    "no model": (lambda p: p.command("--flops", 0.5, model="nobody/nothing"), "Hub id needs the network"),
    "a path out of a name": (lambda p: p.command("--flops", 0.5, model="../../../no/where"), "no directory"),
    "an empty folder": (lambda p: p.command("--flops", 0.5, model=str(p.folder)), "no config.json"),
    "no weights": model(lambda f: (f / WEIGHTS).unlink(), "Cannot load the model"),
    "empty weights": model(byte_edit(lambda b: b""), "Cannot load the model"),
    "half the weights": model(byte_edit(lambda b: b[: len(b) // 2]), "Cannot load the model"),
    "a header that lies": model(byte_edit(lambda b: b"\xff" * 8 + b[8:]), "Cannot load the model"),
    "not safetensors": model(byte_edit(lambda b: b"PK" + b[2:]), "Cannot load the model"),
    "other shapes": model(
        weight_edit(lambda w: w.update({"classifier.weight": torch.zeros(2, 7)})), "Cannot load the model"
    ),
    "an untrained head": model(weight_edit(lambda w: w.pop("classifier.weight")), "never trained"),
    "a layer missing": model(weight_edit(lambda w: [w.pop(k) for k in [*w] if "layer.1.output" in k]), "never trained"),
    "NaN weights": model(weight_edit(lambda w: w["classifier.weight"].fill_(math.nan)), "NaN or infinite"),
    "overflown to half": model(
        weight_edit(lambda w: w["classifier.weight"].fill_(1e6)), "NaN or infinite", "--dtype", "float16"
    ),
    "no model_type": model(json_edit("config.json", lambda c: c.pop("model_type")), "Cannot load the model"),
    "a model_type nobody knows": model(json_edit("config.json", lambda c: c.update(model_type="abacus")), "abacus"),
    "a class nobody has": model(
        json_edit("config.json", lambda c: c.update(architectures=["AbacusForCounting"])), "AbacusForCounting"
    ),
    "a class that is no model": model(
        json_edit("config.json", lambda c: c.update(architectures=["AutoTokenizer"])), "AutoTokenizer"
    ),
    "half a config": model(byte_edit(lambda b: b[:40], "config.json"), "config.json is not a configuration"),
    "a config that is a list": model(byte_edit(lambda b: b"[]", "config.json"), "config.json is not a configuration"),
    "negative layers": model(json_edit("config.json", lambda c: c.update(num_hidden_layers=-1)), "model"),
    "heads that do not divide": model(
        json_edit("config.json", lambda c: c.update(num_attention_heads=5)), "Cannot load the model"
    ),
    "a quantised model": model(
        json_edit("config.json", lambda c: c.update({"quantization_config": {"quant_method": "gptq", "bits": 4}})),
        "are quantised (gptq): prune the model that they were made from",
    ),
    "no tokenizer": model(lambda f: [path.unlink() for path in f.glob("tokenizer*")], "Cannot load a tokenizer"),
    "a damaged tokenizer": model(byte_edit(lambda b: b[:50], "tokenizer.json"), "Cannot load a tokenizer"),
    "a pruned one with half its weights": model(byte_edit(lambda b: b[: len(b) // 2]), "Cannot load", of="pruned"),
    "a pruned one whose shapes were changed": model(
        json_edit(
            "config.json", lambda c: c[SHAPES]["edits"]["linear"].update({"encoder.layer.0.output.dense": [32, 3]})
        ),
        "shape",
        of="pruned",
    ),
    "a pruned one that forgot its shapes": model(
        json_edit("config.json", lambda c: c.pop(SHAPES)), "no field 'shearling'", of="pruned"
    ),
    "an index that leads out": model(
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"classifier.weight": "../../other.safetensors"}})
        ),
        "is not a file of the directory",
    ),
    "modules that lead out": model(
        lambda f: (f / "modules.json").write_text('[{"type": "st.Transformer", "path": "../../x"}]'),
        "leads out of the directory",
    ),
}
CONSTRAINTS: dict[str, Case] = {
    "none": asked("Give a constraint"),
    "zero": asked("outside (0, 1]", "--flops", 0),
    "negative": asked("outside (0, 1]", "--flops", -0.5),
    "more than all": asked("outside (0, 1]", "--params", 1.01),
    "a percentage": asked("outside (0, 1]", "--flops", 50),
    "NaN": asked("nan", "--flops", "nan"),
    "infinite": asked("inf", "--params", "inf"),
    "a word": asked("--flops", "--flops", "half"),
    "infeasible": asked("ask for more", "--flops", 1e-9),
    "infeasible for the paper": asked("ask for", "--flops", 1e-9, "--method", "paper"),
    "steps larger than the layer": asked("ask for", "--flops", 0.01, "--multiple-of", 4096),
    "two, one of which is wrong": asked("outside (0, 1]", "--flops", 0.5, "--params", 0),
    "two, one of which leaves nothing": asked("ask for", "--flops", 0.9, "--params", 1e-9),
    "a table without a latency": (
        lambda p: p.command("--flops", 0.5, "--table", p.table()), "--table is of use with --latency only"
    ),
    "another shape than the table's": (
        lambda p: p.command("--latency", 0.8, "--table", p.table(), "--seq-len", 3), "measure a table of that shape"
    ),
    "another batch size than the table's": (
        lambda p: p.command("--latency", 0.8, "--table", p.table(), "--batch-size", 1), "measure a table of that shape"
    ),
    "a latency less than what is fixed": (
        lambda p: p.command("--latency", 0.01, "--table", p.table()), "ask for at least"
    ),
    "steps of nothing": asked("multiple-of", "--flops", 0.5, "--multiple-of", 0),
    "no samples": asked("samples", "--flops", 0.5, "--samples", 0),
    "a negative seed": asked("seed", "--flops", 0.5, "--seed", -1),
    "no batch": asked("batch-size", "--flops", 0.5, "--batch-size", 0),
    "longer than the model": asked("max", "--flops", 0.5, "--max-length", 100_000),
    "no such method": asked("No method", "--flops", 0.5, "--method", "chisel"),
    "labels for the paper": asked("option of method", "--flops", 0.5, "--method", "paper", "--no-refit"),
    "no such device": asked("No device", "--flops", 0.5, "--device", "abacus"),
    "no such dtype": asked("No dtype", "--flops", 0.5, "--dtype", "int4"),
    "a drop without anything to score on": asked("--eval", "--max-drop", 1.0, "--task", "classification"),
    "a negative drop": asked("max", "--max-drop", -1.0, "--task", "sst2"),
}  # fmt: skip
TABLES: dict[str, Case] = {
    "no table": (lambda p: p.command("--latency", 0.5, "--table", p.folder / "gone.json"), "Cannot read the latency"),
    "data for a table": (lambda p: p.command("--latency", 0.5, "--table", p.rows()), "not a latency table"),
    "another model": table(lambda r: r.update(model_type="distilbert"), "of a distilbert model"),
    "more layers": table(lambda r: r["layers"].append({"heads": 4, "filters": 48}), "3 layers"),
    "negative": table(set_time(-1.0), "shearling profile"),
    "NaN": table(set_time(math.nan), "shearling profile"),
    "huge": table(set_time(1e300), "shearling profile"),
    "a number past counting": table(lambda r: r.update(whole=10**400), "shearling profile"),
    "a unit past counting": table(lambda r: r["sublayers"][0]["units"].append(10**30), "shearling profile"),
    "edited by hand": table(lambda r: r.update(comment="faster"), "unknown field"),
    "fixed above whole": table(lambda r: r.update(fixed=100.0), "is more than"),
    "no sublayers": table(lambda r: r.update(sublayers=[]), "shearling profile"),
    "nested without end": (
        lambda p: p.command("--latency", 0.5, "--table", p.rows("deep.json", "[" * 100_000)),
        "not a latency table",
    ),
}


def occupied(place: Place) -> list[str]:
    place.out.mkdir(parents=True)
    (place.out / "mine").write_text("mine")
    return place.command("--flops", 0.5)


def a_file(place: Place) -> list[str]:
    place.out.parent.mkdir()
    place.out.write_text("mine")
    return place.command("--flops", 0.5)


def under_a_file(place: Place) -> list[str]:
    place.out.parent.write_text("mine")
    return place.command("--flops", 0.5)


def a_loose_link(place: Place) -> list[str]:
    place.out.parent.mkdir()
    place.out.symlink_to(place.folder / "nowhere")
    return place.command("--flops", 0.5)


def read_only(place: Place) -> list[str]:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    place.out.parent.mkdir()
    place.out.parent.chmod(0o500)
    return place.command("--flops", 0.5)


def not_a_sweep(place: Place) -> list[str]:
    place.out.mkdir(parents=True)
    (place.out / "mine").write_text("mine")
    return ["sweep", str(place.dense), "--data", place.rows(), "--eval", place.rows(), "--flops", "0.5", "--out",
            str(place.out), "--task", "classification", "--device", "cpu"]  # fmt: skip


PLACES: dict[str, Case] = {
    "something is there": (occupied, "--force"),
    "a file is there": (a_file, "is a file"),
    "a file where a folder must be": (under_a_file, "result"),
    "a link that leads nowhere": (a_loose_link, "leads nowhere"),
    "read-only": (read_only, "No permission"),
    "a sweep into a folder of something else": (not_a_sweep, "holds no sweep"),
    "nowhere to write": (
        lambda p: ["prune", str(p.dense), "--data", p.rows(), "--flops", "0.5", "--device", "cpu"], "--out"
    ),
    "a name too long": (lambda p: [*p.command("--flops", 0.5), "--out", str(p.folder / ("x" * 300))], "too long"),
    "a NUL in the name": (lambda p: [*p.command("--flops", 0.5), "--out", str(p.folder / "a\0b")], "null byte"),
}  # fmt: skip
OTHERS: dict[str, Case] = {
    "show no checkpoint": (lambda p: ["show", str(p.dense)], "has no shearling.json"),
    "show nothing": (lambda p: ["show", str(p.folder / "gone")], "not a directory"),
    "show a damaged record": (
        lambda p: ["show", p.model(byte_edit(lambda b: b[:99], "shearling.json"), of="pruned")], "not a record"
    ),
    "evaluate without labels": (
        lambda p: ["evaluate", str(p.dense), "--data", p.rows(content=lines({"text": "a"})), "--device", "cpu"], "label"
    ),
    "evaluate no model": (lambda p: ["evaluate", str(p.folder), "--data", p.rows()], "no config.json"),
    "profile no model": (
        lambda p: ["profile", str(p.folder), "--out", str(p.folder / "table.json")], "no config.json"
    ),
    "export in no format": (
        lambda p: ["export", str(p.pruned), "--format", "abacus", "--out", str(p.folder / "x")], "abacus"
    ),
    "sweep over words": (
        lambda p: ["sweep", str(p.dense), "--data", p.rows(), "--flops", "a,b", "--out", str(p.out)],
        "'a' is not a number"
    ),
    "no command": (lambda p: ["prunee"], "prunee"),
}  # fmt: skip
EVERYTHING = {
    f"{group}: {name}": case
    for group, cases in {
        "data": DATA, "model": MODELS, "constraint": CONSTRAINTS, "table": TABLES, "place": PLACES, "other": OTHERS
    }.items()
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYTHING)
def test_refused(place: Place, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, says = EVERYTHING[name]
    arguments = command(place)
    before = place.snapshot()
    capsys.readouterr()
    code = run(arguments)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert says in err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert "SHEARLING_DEBUG" not in err  # that is what surprises end with
    assert place.snapshot() == before


def test_there_are_many() -> None:
    assert len(EVERYTHING) >= 60


ODD: dict[str, tuple[Callable[[Place], list[str]], str]] = {
    "one example": (lambda p: p.command("--flops", 0.5, data=p.rows(content=GOOD)), "only 1 example"),
    "the same example again and again": (lambda p: p.command("--flops", 0.5, data=p.rows(content=GOOD * 70)), ""),
    "texts of no token": (
        lambda p: p.command("--flops", 0.5, data=p.rows(content=GOOD * 64 + '{"text": "", "label": 0}\n')), ""
    ),
    "a text of 100,000 tokens": (
        lambda p: p.command("--flops", 0.5, data=p.rows(content=GOOD * 64 + lines({"text": "a " * 10**5, "label": 0}))),
        "",
    ),
    "a pruned model": (lambda p: p.command("--flops", 0.5, model=str(p.pruned)), "only 10 examples"),
    "a path with dots": (lambda p: [*p.command("--flops", 0.5), "--out", str(p.out / ".." / ".." / "up")], "only 10"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_but_taken(place: Place, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unusual inputs give a model that loads, and a warning where the result is in doubt."""
    command, warning = ODD[name]
    assert run(command(place)) == 0
    record = json.loads(capsys.readouterr().out)
    assert warning in " ".join(record["warnings"])
    assert record["flops"]["ratio"] <= 0.5
    assert shearling.load(Path(record["out"]).resolve()) is not None


def test_a_full_disk(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A real one: a file system of a few blocks."""
    small = place.folder / "tiny"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(small)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a file system")
    try:
        arguments = [*place.command("--flops", 0.5), "--out", str(small / "out")]
        code = run(arguments)
        err = capsys.readouterr().err
        assert (code, list(small.iterdir())) == (2, []), err
        assert "No space left" in err
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
def test_in_a_process_of_its_own(place: Place) -> None:
    """The same through a real command line: nothing on stdout, one line on stderr."""
    result = python("from shearling.cli import main; main()", *place.command("--flops", 2))
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("error:")
    assert len(result.stderr.strip().splitlines()) == 1


def bert(**changes: Any) -> Any:
    return model_of("bert", **changes)


API: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "flops of a word": (lambda: shearling.prune(bert(), batches_of(), flops="half"), shearling.ConstraintError, "half"),
    "flops of True": (lambda: shearling.prune(bert(), batches_of(), flops=True), shearling.ConstraintError, "True"),
    "no constraint": (lambda: shearling.prune(bert(), batches_of()), shearling.ConstraintError, "Give a constraint"),
    "no batches": (lambda: shearling.prune(bert(), [], flops=0.5), shearling.DataError, "empty"),
    "texts without a tokenizer": (
        lambda: shearling.prune(bert(), ["a", "b"], flops=0.5), shearling.InputError, "Give one: tokenizer="
    ),
    "texts from a generator": (
        lambda: shearling.prune(bert(), (text for text in ["a", "b"]), flops=0.5), shearling.DataError, "as a list"
    ),
    "a number for batches": (lambda: shearling.prune(bert(), 3, flops=0.5), shearling.DataError, "int"),
    "batches the model cannot run": (
        lambda: shearling.prune(bert(), [{"pixels": torch.zeros(2, 3)}], flops=0.5), shearling.DataError, "nothing"
    ),
    "tensors of different lengths": (
        lambda: shearling.prune(
            bert(), [{"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(3, 3)}], flops=0.5
        ),
        shearling.DataError, "do not agree",
    ),
    "tokens outside the vocabulary": (
        lambda: shearling.prune(bert(), [{"input_ids": torch.full((2, 3), 10**6)}], flops=0.5),
        shearling.DataError, "vocabulary",
    ),
    "no model": (
        lambda: shearling.prune(torch.nn.Linear(2, 2), batches_of(), flops=0.5), shearling.ModelError, "Linear"
    ),
    "no such method": (
        lambda: shearling.prune(bert(), batches_of(), flops=0.5, method="chisel"), shearling.InputError, "chisel"
    ),
    "a model of another kind": (
        lambda: shearling.prune(
            transformers.AutoModel.from_config(transformers.XLNetConfig(d_model=8, n_layer=1, n_head=2, vocab_size=9)),
            batches_of(), flops=0.5,
        ),
        shearling.UnsupportedArchitecture, "xlnet",
    ),
    "labels in the wrong place": (
        lambda: shearling.prune(
            bert(), [{**batches_of(1)[0], "labels": torch.full((4,), 9)}], flops=0.5, method="paper"
        ),
        shearling.DataError, "9",
    ),
    "load nothing": (lambda: shearling.load("/nowhere/at/all"), shearling.CheckpointError, "not a directory"),
    "a table that is none": (lambda: shearling.load_table("/nowhere.json"), shearling.TableError, "Cannot read"),
    "a sample of no one": (
        lambda: shearling.prune(bert(), batches_of(), flops=0.5, samples=0), shearling.InputError, "sample"
    ),
    "numpy rows that are ragged": (
        lambda: shearling.prune(
            bert(), [{"input_ids": np.array([[1], [1, 2]], dtype=object)}], flops=0.5
        ),
        shearling.DataError, "input_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", API)
def test_refused_in_python(name: str) -> None:
    call, error, says = API[name]
    with pytest.raises(error, match=says):
        call()


def test_a_tokenizer_of_another_model(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokens have no embedding; torch would end with an index error, or a crash on a GPU."""

    def swap(folder: Path) -> None:
        tokenizer = bert_tokenizer()
        tokenizer.add_tokens([f"word{i}" for i in range(90)])
        tokenizer.save_pretrained(folder)

    data = place.rows(content=lines({"text": "word88 word89 film", "label": 0}) * 70)
    code = run(place.command("--flops", 0.5, model=place.model(swap), data=data))
    err = capsys.readouterr().err
    assert code == 2, err
    assert "vocabulary" in err
