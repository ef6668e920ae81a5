"""A model directory becomes a checked file, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shearling.checkpoint.pretrained import load_model, load_reader, load_tokenizer
from shearling.checkpoint.record import base_of
from shearling.data import load_rows
from shearling.errors import InputError, ModelError, OutputError
from shearling.export import exported, onnx
from shearling.export.check import Runner, check
from shearling.export.graph import reference
from shearling.export.inputs import Inputs, inputs_from_rows, inputs_from_tokenizer
from shearling.export.result import Exported, Measured
from shearling.files import check_permission, writing
from shearling.hidden import clear_hidden, hidden_beside
from shearling.latency.timing import in_turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.engine.progress import Watcher

FORMATS = {"onnx": onnx, "exported": exported}
SUFFIXES = {"onnx": ".onnx", "exported": ".pt2"}


def export_model(
    name: str,
    out: Path,
    *,
    format: str = "onnx",  # noqa: A002 - the option's name
    precision: str = "float32",
    data: str | None = None,
    task: str | None = None,
    dense: str | None = None,
    rounds: int = 20,
    force: bool = False,
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
) -> Exported:
    """Write the model as a file, checked against PyTorch on real inputs first; a failed check leaves nothing.

    dense   a model to compare size and latency with; the one the record names, unless given
    """
    if format not in FORMATS:
        raise InputError(f"No format '{format}'; there are {', '.join(FORMATS)}.")
    FORMATS[format].require()
    check_file(out, force=force)
    tell = watcher or (lambda stage, done, total: None)
    tell("load", 0, 1)
    model = load_model(name, device="cpu", dtype="float32", trust_remote_code=trust_remote_code)
    batches = example_inputs(model, name, data, task, trust_remote_code=trust_remote_code)
    other = dense or base_of(Path(name))
    with beside(out) as folder:
        path = folder / out.name
        expected = reference(model, batches)
        run, outputs = _write(model, batches, path, format, precision, tell)
        tell("check", 0, 1)
        difference = check(run, batches, expected, precision=precision)
        del model
        runs: dict[str, Callable[[], object]] = {"this": lambda: run(batches[0])}
        files = {"this": (name, path)}
        if other is not None:
            whole = load_model(other, device="cpu", dtype="float32", trust_remote_code=trust_remote_code)
            (folder / "dense").mkdir()
            files["dense"] = other, folder / "dense" / out.name
            run_dense, _ = _write(whole, batches, files["dense"][1], format, precision, tell)  # only to be timed
            del whole
            runs["dense"] = lambda: run_dense(batches[0])
        tell("time", 0, 1)
        times = dict(zip(runs, in_turns(list(runs.values()), torch.device("cpu"), rounds=rounds), strict=True))
        found = {key: Measured(model_, size_of(file), times[key]) for key, (model_, file) in files.items()}
        shutil.rmtree(folder / "dense", ignore_errors=True)
        result = Exported(
            out, format, precision, _described(batches[0]), outputs, difference,
            list(next(iter(batches[0].values())).shape), found["this"], found.get("dense"),
        )  # fmt: skip
        put_in_place(folder, out)
    return result


def example_inputs(
    model: PreTrainedModel, name: str, data: str | None, task: str | None, *, trust_remote_code: bool = False
) -> list[Inputs]:
    """Batches from the data where given, else from the tokenizer."""
    from shearling.data import find_task, infer_task

    if data is None:
        try:
            tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        except ModelError:
            tokenizer = None  # a model of pictures, or a directory of weights alone
        return inputs_from_tokenizer(model, tokenizer)
    chosen = find_task(task) if task else infer_task(model)
    if model.main_input_name == "input_ids":  # of texts, perhaps with pictures beside them
        reader = load_tokenizer(name, trust_remote_code=trust_remote_code)
    else:
        reader = load_reader(name, model, trust_remote_code=trust_remote_code)
    return inputs_from_rows(model, reader, load_rows(data, chosen), chosen)


def _write(
    model: PreTrainedModel, batches: Sequence[Inputs], path: Path, format_: str, precision: str, tell: Watcher
) -> tuple[Runner, list[str]]:
    """The file, opened again, and the names of its outputs."""
    tell("export", 0, 1)
    outputs = list(reference(model, batches[:1])[0])
    FORMATS[format_].write(
        model.half() if precision == "float16" else model, batches[0], outputs, path, precision=precision
    )
    return FORMATS[format_].open_runner(path), outputs


def _described(inputs: Inputs) -> dict[str, list[str | int]]:
    from shearling.export.graph import axes

    varying = axes(inputs)
    return {name: [varying[name].get(i, n) for i, n in enumerate(t.shape)] for name, t in inputs.items()}


def size_of(path: Path) -> int:
    """Bytes of a file and of the weights beside it."""
    return sum(part.stat().st_size for part in path.parent.glob(path.name + "*") if part.is_file())


def check_file(out: Path, *, force: bool) -> None:
    """Complain early about the place to write to."""
    if out.is_dir():
        raise OutputError(f"{out} is a directory; name a file, such as {out / 'model.onnx'}.")
    if out.exists() and not force:
        raise OutputError(f"{out} exists; choose another --out, or replace it with --force.")
    check_permission(out)


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A hidden folder next to the file, gone afterwards whatever happens."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        clear_hidden(out)
        folder = hidden_beside(out, ".part")
    except OSError as error:
        raise OutputError(f"Cannot write beside {out}: {error.strerror}.") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, out: Path) -> None:
    """Rename the files to where they belong, the one that is opened last of all."""
    parts = sorted((p for p in folder.iterdir() if p.is_file()), key=lambda p: p.name == out.name)
    with writing(out):
        for part in parts:
            part.replace(out.parent / part.name)
