"""Prune a source: read -> measure -> choose -> shrink -> repair -> verify -> score -> time -> save.

`shearling.prune` and the command go this way; `max_drop` and `sweep` take its parts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shearling.checkpoint.load import read_record
from shearling.checkpoint.pretrained import is_remote
from shearling.checkpoint.record import write_page
from shearling.checkpoint.sentence import companions
from shearling.engine.distributed import on_first
from shearling.engine.hooks import device_of, frozen
from shearling.engine.progress import Watcher
from shearling.errors import InputError
from shearling.evaluation.exam import Evaluation, Exam
from shearling.files import RECORD, check_writable
from shearling.integrations.sentence_transformers import give_back
from shearling.latency.inputs import example_inputs, placed
from shearling.latency.meet import checked_table
from shearling.latency.timing import device_name, in_turns
from shearling.methods import Method
from shearling.models.structure import structure_of
from shearling.pipeline import Plan, Pruned, measure, prune
from shearling.report.record import Report
from shearling.workflows.source import Loaded, Source, check_early, exam_of, folder_of, labels_for, quiet, read_source
from shearling.workflows.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.workflows.max_drop import Drop

LENGTH = 128  # tokens that models are timed at, where the sample does not tell


def prune_source(
    source: Source,
    target: Target,
    method: Method,
    *,
    out: Path | None = None,
    evaluation: Any = None,
    limit: int | None = None,
    drop: Drop | None = None,
    timing: bool = True,
    force: bool = False,
    watcher: Watcher | None = None,
) -> Pruned:
    """Prune; writes `out` unless it is None.

    evaluation, limit  labelled rows (the first so many) that both models are scored on
    drop               find the smallest budget that loses no more than this, instead of meeting the target's
    timing             with an evaluation, also time both models
    """
    target = target.checked() if drop is None else drop.checked(target)
    if out is not None:
        check_writable(out, force=force, keep=(source.name,))
    check_early(source, evaluation)
    scored = drop is not None or evaluation is not None
    if limit is not None and not scored:
        raise InputError("--limit is of use with --eval only: it is how many rows to score on.")
    loaded = read_source(source, labels=labels_for(method), scored=scored, watcher=watcher)
    check_loaded(loaded, target)
    exam = exam_of(source, loaded, evaluation, limit=limit) if scored else None
    if drop is not None and exam is not None:
        pruned = drop.meet(measured(source, loaded, method, watcher), target, exam, watcher)
    else:
        pruned = prune(
            loaded.model,
            loaded.examples,
            **vars(target),
            method=method,
            samples=source.samples,
            seed=source.seed,
            length=source.length,
            watcher=watcher,
        )
        pruned = _with_warnings(pruned, remarks(loaded))
        if exam is not None:
            both = [take(exam, model, watcher) for model in (loaded.model, pruned.model)]
            pruned = replace(pruned, report=with_scores(pruned.report, *both))
    if exam is not None and timing and "latency" not in pruned.report.extra:
        length = target.seq_len or pruned.report.mean_length
        found = on_first(lambda: time_both(loaded.model, pruned.model, target.batch_size, length))
        pruned = replace(pruned, report=replace(pruned.report, timing=found))
    if loaded.sentence is not None:
        pruned = give_back(pruned, loaded.sentence)
    if out is not None:
        keep(pruned, source, loaded, out, force=force)
    return pruned


def check_loaded(loaded: Loaded, target: Target) -> None:
    """Complain about a latency table of another model before measuring."""
    if target.table is not None:
        checked_table(target.table, target.latency, structure_of(loaded.model))


def measured(
    source: Source, loaded: Loaded, method: Method, watcher: Watcher | None = None, *, seed: int | None = None
) -> Plan:
    """The measurement of a source; one serves every budget."""
    plan = measure(
        loaded.model,
        loaded.examples,
        method=method,
        samples=source.samples,
        seed=source.seed if seed is None else seed,
        length=source.length,
        watcher=watcher,
    )
    return replace(plan, warnings=[*plan.warnings, *remarks(loaded)])


def measure_source(source: Source, method: Method, *, watcher: Watcher | None = None) -> tuple[Plan, Loaded]:
    """Read a source and measure it."""
    loaded = read_source(source, labels=labels_for(method), watcher=watcher)
    return measured(source, loaded, method, watcher), loaded


def remarks(loaded: Loaded) -> list[str]:
    """What a report has to say about how the model was read."""
    if any(map(is_remote, (loaded.model, loaded.model.config, loaded.tokenizer))):
        return ["code that came with the model was run (--trust-remote-code)"]
    return []


def _with_warnings(pruned: Pruned, more: list[str]) -> Pruned:
    return replace(pruned, report=replace(pruned.report, warnings=[*pruned.report.warnings, *more]))


def take(exam: Exam, model: PreTrainedModel, watcher: Watcher | None = None) -> Evaluation:
    """Score a model, on one process where there are several."""
    tell = watcher or quiet
    tell("evaluate", 0, 1)
    return on_first(lambda: exam.take(model, progress=partial(tell, "evaluate")))


def with_scores(report: Report, dense: Evaluation, pruned: Evaluation) -> Report:
    """The report with both models' scores; `evaluations` is the list that later scores are added to."""
    found = {
        "task": pruned.task, "metric": pruned.metric, "dense": dense.to_json()["value"],
        "pruned": pruned.to_json()["value"], "examples": pruned.examples,
    }  # fmt: skip
    listed = {"evaluations": [replace(pruned, dense=dense.value).to_json()]}
    return replace(report, evaluation=found, extra=report.extra | listed)


def time_both(dense: PreTrainedModel, pruned: PreTrainedModel, batch_size: int, length: float) -> dict[str, Any]:
    """Both models in turns on the same random tokens: the record's `timing`."""
    place = device_of(dense)
    inputs = placed(example_inputs(dense, batch_size, round(length) or LENGTH), dense)
    with frozen(dense), frozen(pruned), torch.inference_mode():
        before, after = in_turns([partial(model, **inputs) for model in (dense, pruned)], place)
    return {
        "device": device_name(place), "measured": after.median / before.median, "dense_ms": 1e3 * before.median,
        "pruned_ms": 1e3 * after.median, "batch_size": batch_size, "seq_len": round(length) or LENGTH,
        "dtype": str(dense.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if place.type == "cpu" else None,
    }  # fmt: skip


def keep(pruned: Pruned, source: Source, loaded: Loaded, out: Path, *, force: bool = False) -> None:
    """Write a pruned model, with the files that lie beside the dense one."""
    beside = companions(source.name) if folder_of(source) or isinstance(source.model, str) else None
    pruned.save(out, source=beside or loaded.tokenizer, force=force)


def write_report(record: dict[str, Any], path: Path, *, force: bool = False) -> None:
    """The record of a run as a page; `out` in it says where the model is."""
    folder = Path(record["out"] or ".")
    saved = read_record(folder) if (folder / RECORD).is_file() else {}  # it also says what was pruned
    on_first(lambda: write_page(saved | record, folder, path, force=force))
