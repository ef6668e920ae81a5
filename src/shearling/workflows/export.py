"""`shearling.export`: write a model for another engine, checked against PyTorch."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shearling.checkpoint.pretrained import load_model, load_reader, load_tokenizer
from shearling.checkpoint.record import add_entry, base_of
from shearling.data import task_of
from shearling.engine.progress import Watcher
from shearling.errors import InputError, ModelError
from shearling.evaluation.exam import Exam, make_exam
from shearling.exporters.check import Runner, check
from shearling.exporters.formats import Job
from shearling.exporters.graph import axes, reference
from shearling.exporters.inputs import CALIBRATION, EXAMPLES, Inputs, inputs_from_rows, inputs_from_tokenizer
from shearling.exporters.place import add_companions, check_place, mark, place_of, size_of, whole
from shearling.exporters.result import Exported, Measured
from shearling.exporters.table import Format, check_suits, find_format
from shearling.files import RECORD, signals_held
from shearling.latency.timing import in_turns
from shearling.pipeline import Pruned
from shearling.report.facts import title_of
from shearling.workflows.progress import ProgressLike, quiet, step, watching
from shearling.workflows.source import rows_of, text_columns_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from shearling.workflows.arguments import Data

STAGES = {"load": 20.0, "export": 50.0, "check": 15.0, "time": 15.0}
QUANTISE = ("dynamic", "static")
CALIBRATED = {"int8-static": CALIBRATION, "q4_0": EXAMPLES}  # number of calibration examples


def export(
    model: Pruned | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "onnx",  # noqa: A002 - the option's name
    fp16: bool = False,
    int8: bool = False,
    quantise: str | None = None,
    dtype: str | None = None,
    data: Data | None = None,
    task: str | None = None,
    eval: Data | None = None,  # noqa: A002
    dense: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: ProgressLike = True,
) -> Exported:
    """Write a model, dense or pruned, for another engine, checked against PyTorch; a failed check leaves nothing.

    >>> shearling.export("my-model-50", "my-model-50.onnx", int8=True)  # doctest: +SKIP

    model       a directory or Hub id, or the result of `shearling.prune`
    out         output file; for onnx also a directory with the layout for servers
    format      "onnx", "torch", "openvino", "gguf" or "ctranslate2"
    fp16        half precision
    int8        8-bit integers; gguf: q8_0
    quantise    int8 activation ranges: "dynamic" (per batch) or "static" (calibrated on `data`)
    dtype       gguf: "f16", "q8_0" or "q4_0"
    data        examples for the check and calibration: texts, pairs, a file name, a data set
    task        task of the data, such as sst2; default: by the model's head
    eval        labelled rows on which the dense model, this one and the file are scored
    dense       a model to compare size and latency with; default: the one that this was pruned from
    trust_remote_code  run custom code of the model
    force       replace `out` if it exists
    progress    True, False, or a callback (stage, done, total)
    """
    precision = precision_of(fp16=fp16, int8=int8, quantise=quantise, dtype=dtype)
    options: dict[str, Any] = {
        "format": format, "precision": precision, "data": data, "task": task, "eval": eval,
        "dense": None if dense is None else str(dense), "force": force, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    with watching(progress, STAGES) as watcher:
        if isinstance(model, (str, os.PathLike)):
            return export_model(str(model), Path(out), **options, watcher=watcher)
        if not isinstance(model, Pruned):
            raise ModelError(
                f"export takes a directory, a Hub id, or the result of shearling.prune, not a {type(model).__name__}; "
                "save this model first."
            )
        with tempfile.TemporaryDirectory() as folder:
            saved = model.save(Path(folder) / "model")
            result = export_model(str(saved), Path(out), **options, watcher=watcher)
            return replace(result, this=replace(result.this, model=title_of(model.report.to_json())))


def precision_of(*, fp16: bool, int8: bool, quantise: str | None, dtype: str | None) -> str | None:
    """The requested precision; None is the format's default."""
    if quantise is not None and quantise not in QUANTISE:
        raise InputError(f"--quantise {quantise} is not known; there are dynamic and static.")
    asked = {"--fp16": fp16, "--int8": int8 or quantise is not None, "--dtype": dtype is not None}
    given = [name for name, wanted in asked.items() if wanted]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} ask for different precisions; give one of them.")
    if asked["--int8"]:
        return "int8" if quantise is None else f"int8-{quantise}"
    return "float16" if fp16 else dtype


@dataclass
class Wanted:
    """The options and inputs of an export, used for the model and for the dense model it is compared with."""

    name: str
    kind: Format
    precision: str
    data: Data | None = None
    task: str | None = None
    trust_remote_code: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    batches: list[Inputs] = field(default_factory=list)
    calibration: list[Inputs] = field(default_factory=list)

    def load(self, name: str) -> PreTrainedModel:
        """Load a model in float32 on the CPU."""
        return load_model(name, device="cpu", dtype="float32", trust_remote_code=self.trust_remote_code)

    def read(self, model: PreTrainedModel) -> None:
        """Load the tokenizer, and prepare the batches for the check and calibration."""
        with suppress(ModelError):  # image models, directories without a tokenizer
            self.tokenizer = load_tokenizer(self.name, trust_remote_code=self.trust_remote_code)
        part = self.kind.part(model)
        if self.data is None:
            self.batches = self.calibration = inputs_from_tokenizer(part, self.tokenizer)
            return
        reader: Any = self.tokenizer
        if reader is None or part.main_input_name != "input_ids":  # images
            reader = load_reader(self.name, part, trust_remote_code=self.trust_remote_code)
        task = task_of(model, self.task)
        read = partial(
            inputs_from_rows, part, reader, rows_of(self.data, task), task, text_columns=text_columns_of(self.data)
        )
        self.batches = self.calibration = read(samples=EXAMPLES)
        if self.precision in CALIBRATED:
            self.calibration = read(samples=CALIBRATED[self.precision], seed=1)

    def write(self, model: PreTrainedModel, path: Path, *, only_timed: bool = False) -> tuple[Runner, list[str]]:
        """Write the file and open it; returns its runner and output names. If only timed, calibration is minimal."""
        part = self.kind.part(model)
        outputs = list(reference(part, self.batches[:1])[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        calibration = self.calibration[:1] if only_timed else self.calibration
        if self.precision == "q4_0" and (only_timed or self.data is None):
            calibration = []  # round to nearest
        job = Job(part, self.batches[0], outputs, path, self.precision, calibration, self.tokenizer, self.name)
        # torch swallows a KeyboardInterrupt in weakref callbacks, and may abort on one between dispatch modes: the
        # first Ctrl-C is delayed until the graphs are written, loaded and freed, the second is not.
        with signals_held(most=1):
            self.kind.write(job)
            runner = self.kind.open_runner(path)
            gc.collect()
        return runner, outputs


class FileModel(nn.Module):
    """A module that runs the exported file, to be scored like the model."""

    def __init__(self, model: PreTrainedModel, run: Runner) -> None:
        super().__init__()
        self.config, self.run = model.config, run
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)  # for `device_of`

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the file."""
        return {name: torch.from_numpy(values) for name, values in self.run(inputs).items()}


def export_model(
    name: str,
    out: Path,
    *,
    format: str = "onnx",  # noqa: A002 - the option's name
    precision: str | None = None,
    data: Data | None = None,
    task: str | None = None,
    eval: Data | None = None,  # noqa: A002
    dense: str | None = None,
    rounds: int = 20,
    force: bool = False,
    trust_remote_code: bool = False,
    watcher: Watcher = quiet,
) -> Exported:
    """Write the model as a file and check it against PyTorch; a failed check leaves nothing behind.

    precision  float32, float16, int8 (or int8-static, int8-dynamic), q8_0, q4_0; default: the format's first
    data       examples for the check, and for calibrating static quantisation and q4_0
    eval       labelled rows on which dense, model and file are scored
    dense      a model to compare size and latency with; default: the one in the record
    """
    kind = find_format(format)
    wanted = Wanted(name, kind, kind.precision(precision), data, task, trust_remote_code)
    place = place_of(out, kind, name)
    check_place(place, kind, force=force, source=name)
    with step(watcher, "load"):
        model = wanted.load(name)
        check_suits(kind, model)
        wanted.read(model)
    other = dense or base_of(Path(name))
    exam = None if eval is None else _exam(wanted, model, eval)
    scores: dict[str, Any] = {}

    def score(step: str, one: Any) -> None:
        if exam is not None:
            result = exam.take(one, device="cpu")
            scores.update(task=result.task, metric=result.metric, examples=result.examples)
            scores[step] = round(result.value, 4)

    with whole(place, force=force) as path, tempfile.TemporaryDirectory() as aside:
        path_dense = place.file(Path(aside))
        expected = reference(kind.part(model), wanted.batches)
        score("model", model)
        with step(watcher, "export"):
            run, outputs = wanted.write(model, path)
        if place.served:
            add_companions(path.parents[1], model, wanted.tokenizer, Path(name))
        with step(watcher, "check"):
            difference = check(run, wanted.batches, expected, precision=wanted.precision)
        score("exported", FileModel(model, run))
        del model
        runs: dict[str, Callable[[], object]] = {"this": lambda: run(wanted.batches[0])}
        if other is not None:
            original = wanted.load(other)
            score("dense", original)
            run_dense, _ = wanted.write(original, path_dense, only_timed=True)
            del original
            runs["dense"] = lambda: run_dense(wanted.batches[0])
        with step(watcher, "time"):
            times = dict(zip(runs, in_turns(list(runs.values()), torch.device("cpu"), rounds=rounds), strict=True))
        found = {"this": Measured(name, size_of(path), times["this"])}
        if other is not None:
            found["dense"] = Measured(other, size_of(path_dense), times["dense"])
        if "dense" in scores:
            scores["pruned"] = scores["model"]
        result = Exported(
            place.out, kind.name, wanted.precision, _described(wanted.batches[0]), outputs, difference,
            list(next(iter(wanted.batches[0].values())).shape), kind.runtime(), found["this"], found.get("dense"),
            scores or None, _notes(wanted),
        )  # fmt: skip
        if place.folder:
            mark(path.parents[1] if place.served else path, result.to_json())
    if (Path(name) / RECORD).is_file():
        add_entry(Path(name), "exports", result.entry(Path(name)), key="out")
    return result


def _exam(wanted: Wanted, model: PreTrainedModel, rows: Data) -> Exam:
    if wanted.kind.part(model) is not model:
        raise InputError(f"--eval cannot score {wanted.kind.name}: it writes only the encoder, without its head.")
    if wanted.tokenizer is None:
        raise InputError("--eval needs the tokenizer of the model, which was not found.")
    task = task_of(model, wanted.task)
    return make_exam(model, wanted.tokenizer, rows_of(rows, task, split="dev"), task)


def _notes(wanted: Wanted) -> list[str]:
    if wanted.precision == "int8-static" and wanted.data is None:
        return ["Calibrated on a few built-in sentences; give --data to calibrate on your own texts."]
    if wanted.precision == "q4_0":
        if wanted.data is None:
            return [
                "Weights were rounded to nearest; with --data, rounding takes the inputs of each layer into account."
            ]
        return ["Rounding took the inputs of each layer on --data into account."]
    return []


def _described(inputs: Inputs) -> dict[str, list[str | int]]:
    varying = axes(inputs)
    return {name: [varying[name].get(i, n) for i, n in enumerate(t.shape)] for name, t in inputs.items()}
