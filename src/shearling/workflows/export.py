"""A model directory becomes a checked file, or nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shearling.checkpoint.pretrained import load_model, load_reader, load_tokenizer
from shearling.checkpoint.record import add_export, base_of
from shearling.data import find_task, infer_task, load_rows
from shearling.errors import InputError, ModelError
from shearling.evaluation.exam import Exam, make_exam
from shearling.export.check import Runner, check
from shearling.export.formats import Job
from shearling.export.graph import axes, reference
from shearling.export.inputs import CALIBRATION, EXAMPLES, Inputs, inputs_from_rows, inputs_from_tokenizer
from shearling.export.place import add_companions, check_place, mark, place_of, size_of, whole
from shearling.export.result import Exported, Measured
from shearling.export.table import Format, Suits, check_suits, find_format, find_precision, suitable
from shearling.files import RECORD
from shearling.latency.timing import in_turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from shearling.engine.progress import Watcher


@dataclass
class Wanted:
    """One model and what it is exported with; read once, used for the model and for the dense one beside it."""

    name: str
    format: str
    kind: Format
    precision: str
    data: str | None = None
    task: str | None = None
    trust_remote_code: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    batches: list[Inputs] = field(default_factory=list)
    calibration: list[Inputs] = field(default_factory=list)

    def load(self, name: str) -> PreTrainedModel:
        """A model in float32 on the CPU."""
        return load_model(name, device="cpu", dtype="float32", trust_remote_code=self.trust_remote_code)

    def read(self, model: PreTrainedModel) -> None:
        """The tokenizer, batches to check with, and batches to calibrate on."""
        self.tokenizer = _tokenizer(self.name, trust_remote_code=self.trust_remote_code)
        part = self.kind.part(model)
        where = self.name, self.data, self.task or (infer_task(model).name if self.data else None)
        self.batches = example_inputs(part, *where, trust_remote_code=self.trust_remote_code)
        self.calibration = self.batches
        if self.precision == "int8-static" and self.data is not None:
            self.calibration = example_inputs(
                part, *where, trust_remote_code=self.trust_remote_code, samples=CALIBRATION, seed=1
            )

    def write(self, model: PreTrainedModel, path: Path) -> tuple[Runner, list[str]]:
        """The file, opened again, and the names of its outputs."""
        part = self.kind.part(model)
        outputs = list(reference(part, self.batches[:1])[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        self.kind.write(
            Job(part, self.batches[0], outputs, path, self.precision, self.calibration, self.tokenizer, self.name)
        )
        return self.kind.open_runner(path), outputs


def export_model(
    name: str,
    out: Path,
    *,
    format: str = "onnx",  # noqa: A002 - the option's name
    precision: str | None = None,
    data: str | None = None,
    task: str | None = None,
    eval: str | None = None,  # noqa: A002
    dense: str | None = None,
    rounds: int = 20,
    force: bool = False,
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
) -> Exported:
    """Write the model as a file, checked against PyTorch on real inputs first; a failed check leaves nothing.

    precision  float32, float16, int8 (or int8-static, int8-dynamic), q8_0; the format's first unless given
    data       examples to check with, and to calibrate static quantisation on
    eval       labelled rows: dense, model and file are scored on them
    dense      a model to compare size and latency with; the one the record names, unless given
    """
    label, kind = find_format(format)
    wanted = Wanted(
        name, label, kind, find_precision(label, kind, precision), data, task, trust_remote_code=trust_remote_code
    )
    place = place_of(out, kind, name)
    check_place(place, kind, force=force, source=name)
    tell = watcher or (lambda stage, done, total: None)
    tell("load", 0, 1)
    model = wanted.load(name)
    check_suits(label, kind, model)
    wanted.read(model)
    other = dense or base_of(Path(name))
    scores = None if eval is None else Scores(_exam(wanted, model, eval))
    with whole(place, force=force) as path, tempfile.TemporaryDirectory() as aside:
        path_dense = place.file(Path(aside))
        expected = reference(kind.part(model), wanted.batches)
        if scores is not None:
            scores.take("model", model)
        tell("export", 0, 1)
        run, outputs = wanted.write(model, path)
        if place.served:
            add_companions(path.parents[1], model, wanted.tokenizer, Path(name))
        tell("check", 0, 1)
        difference = check(run, wanted.batches, expected, precision=wanted.precision)
        if scores is not None:
            scores.take("exported", FileModel(model, run))
        del model
        runs: dict[str, Callable[[], object]] = {"this": lambda: run(wanted.batches[0])}
        if other is not None:
            original = wanted.load(other)
            if scores is not None:
                scores.take("dense", original)
            run_dense, _ = wanted.write(original, path_dense)  # only to be timed
            del original
            runs["dense"] = lambda: run_dense(wanted.batches[0])
        tell("time", 0, 1)
        times = dict(zip(runs, in_turns(list(runs.values()), torch.device("cpu"), rounds=rounds), strict=True))
        found = {"this": Measured(name, size_of(path), times["this"])}
        if other is not None:
            found["dense"] = Measured(other, size_of(path_dense), times["dense"])
        result = Exported(
            place.out, label, wanted.precision, _described(wanted.batches[0]), outputs, difference,
            list(next(iter(wanted.batches[0].values())).shape), kind.runtime(), found["this"], found.get("dense"),
            None if scores is None else scores.to_json(), _notes(wanted),
        )  # fmt: skip
        if place.folder:
            mark(path.parents[1] if place.served else path, result.to_json())
    if (Path(name) / RECORD).is_file():
        add_export(Path(name), result.entry(Path(name)))
    return result


def example_inputs(
    model: PreTrainedModel,
    name: str,
    data: str | None,
    task: str | None,
    *,
    trust_remote_code: bool = False,
    samples: int = EXAMPLES,
    seed: int = 0,
) -> list[Inputs]:
    """Batches from the data where given, else from the tokenizer."""
    if data is None:
        return inputs_from_tokenizer(model, _tokenizer(name, trust_remote_code=trust_remote_code))
    chosen = find_task(task) if task else infer_task(model)
    if model.main_input_name == "input_ids":  # of texts, perhaps with pictures beside them
        reader = load_tokenizer(name, trust_remote_code=trust_remote_code)
    else:
        reader = load_reader(name, model, trust_remote_code=trust_remote_code)
    return inputs_from_rows(model, reader, load_rows(data, chosen), chosen, samples=samples, seed=seed)


def _tokenizer(name: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(name, trust_remote_code=trust_remote_code)
    except ModelError:
        return None  # a model of pictures, or a directory of weights alone


def list_formats(name: str, *, trust_remote_code: bool = False) -> list[Suits]:
    """Which formats suit a model, and why the others do not."""
    return suitable(load_model(name, device="cpu", trust_remote_code=trust_remote_code))


class Scores:
    """One exam, taken by the dense model, the model and the file."""

    def __init__(self, exam: Exam) -> None:
        self.exam = exam
        self.found: dict[str, Any] = {}

    def take(self, step: str, model: Any) -> None:
        """Score one of them."""
        result = self.exam.take(model, device="cpu")
        self.found |= {"task": result.task, "metric": result.metric, "examples": result.examples}
        self.found[step] = round(result.value, 4)

    def to_json(self) -> dict[str, Any]:
        """Task, metric, examples and the value at each step; the model is also called `pruned` beside a dense one."""
        return self.found | ({"pruned": self.found["model"]} if "dense" in self.found else {})


class FileModel(nn.Module):
    """A file in the place of the model, to be scored like it."""

    def __init__(self, model: PreTrainedModel, run: Runner) -> None:
        super().__init__()
        self.config, self.run = model.config, run
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)  # tells the device

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the file gives."""
        return {name: torch.from_numpy(values) for name, values in self.run(inputs).items()}


def _exam(wanted: Wanted, model: PreTrainedModel, rows: str) -> Exam:
    if wanted.kind.part(model) is not model:
        raise InputError(f"--eval scores what {wanted.format} writes, and that is the encoder without its head.")
    if wanted.tokenizer is None:
        raise InputError("--eval needs the tokenizer of the model, and none was found beside it.")
    task = find_task(wanted.task) if wanted.task else infer_task(model)
    return make_exam(model, wanted.tokenizer, load_rows(rows, task), task)


def _notes(wanted: Wanted) -> list[str]:
    if wanted.precision == "int8-static" and wanted.data is None:
        return ["Calibrated on a few sentences that come with shearling; give --data for ranges of your own texts."]
    return []


def _described(inputs: Inputs) -> dict[str, list[str | int]]:
    varying = axes(inputs)
    return {name: [varying[name].get(i, n) for i, n in enumerate(t.shape)] for name, t in inputs.items()}
