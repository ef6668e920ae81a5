"""Prune a source: read -> measure -> choose -> shrink -> repair -> verify -> score -> time -> save.

Used by `shearling.prune` and the command; `max_drop` and `sweep` share its parts.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shearling.checkpoint.load import read_record
from shearling.checkpoint.record import add_curve, write_page
from shearling.engine.distributed import on_first
from shearling.engine.hooks import device_of, frozen
from shearling.engine.precision import dtype_name
from shearling.engine.progress import Watcher
from shearling.errors import InputError, ShearlingError
from shearling.evaluation.exam import Evaluation, Exam
from shearling.evaluation.flipped import flipped
from shearling.files import RECORD, check_writable
from shearling.integrations.sentence_transformers import give_back
from shearling.latency.inputs import example_inputs
from shearling.latency.timing import device_name, in_turns, layer_shares
from shearling.methods import Method
from shearling.models.structure import structure_of
from shearling.pipeline import Pruned, measure
from shearling.report.points import command_of, tried_chart
from shearling.target import Target
from shearling.workflows.progress import SCORED, quiet
from shearling.workflows.source import Source, companions_of, data_name, exam_of, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.workflows.max_drop import Drop

logger = logging.getLogger("shearling")
LENGTH = 128  # tokens for timing, if the sample has no length


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
    watcher: Watcher = quiet,
) -> Pruned:
    """Prune a source, and write the result to `out` unless it is None.

    evaluation, limit  labelled rows (the first `limit`) for scoring both models
    drop               find the smallest budget within this loss, instead of meeting the target's
    timing             with an evaluation, also time both models
    """
    target = target.checked() if drop is None else drop.checked(target)
    if out is not None:
        check_writable(out, force=force, keep=(source.name,))
    scored = drop is not None or evaluation is not None
    if limit is not None and not scored:
        raise InputError("--limit is of use with --eval only: it is the number of rows to score on.")
    loaded = open_source(source, evaluation, methods=[method], scored=scored, watcher=watcher)
    exam = exam_of(source, loaded, evaluation, limit=limit, dense=loaded.model) if scored else None
    if drop is not None:
        target.check_fits(structure_of(loaded.model), method)
    before = (
        exam.take(loaded.model, progress=partial(watcher, SCORED[0])) if exam is not None and drop is None else None
    )
    plan = measure(
        loaded.model, loaded.examples, samples=source.samples, seed=source.seed, length=source.length, method=method,
        watcher=watcher, notes=loaded.notes, target=target if drop is None else None,
    )  # fmt: skip
    if drop is not None and exam is not None:
        pruned = drop.meet(plan, target, exam, watcher)
    else:
        pruned = plan.meet(target)
        if exam is not None and before is not None:
            after = exam.take(pruned.model, progress=partial(watcher, SCORED[1]))
            pruned = with_scores(pruned, exam, before, after)
    if exam is not None and timing:
        try:
            pruned = timed(pruned, loaded.model, target.batch_size or 1, target.seq_len)
        except ShearlingError as error:  # the result must not be lost
            logger.warning("The models were not timed: %s", error)
    if loaded.sentence is not None:
        pruned = give_back(pruned, loaded.sentence)
    if out is not None:
        pruned.save(out, source=companions_of(source, loaded), force=force)
        if tried := pruned.report.max_drop:
            on_first(lambda: add_curve(out, tried_chart(tried, title=Path(source.name).name, standalone=True)))
    return pruned


def with_scores(pruned: Pruned, exam: Exam, dense: Evaluation, score: Evaluation) -> Pruned:
    """Add both models' scores and changed predictions to the result.

    Later scores are added to `evaluations` of the record.
    """
    found = {
        "task": score.task, "metric": score.metric, "dense": dense.to_json()["value"],
        "pruned": score.to_json()["value"], "examples": score.examples,
    }  # fmt: skip
    listed = [replace(score, dense=dense.value).to_json()]
    report = replace(pruned.report, evaluation=found, evaluations=listed)
    return replace(pruned, report=report, flipped=changes(exam, dense, score))


def changes(exam: Exam, dense: Evaluation, score: Evaluation) -> dict[str, Any] | None:
    """Examples with different predictions, as plain data for the report page; None without discrete predictions."""
    found = flipped(exam, dense.predictions, score.predictions)
    return None if found is None else asdict(found)


def timed(pruned: Pruned, dense: PreTrainedModel, batch_size: int = 1, seq_len: int | None = None) -> Pruned:
    """Time both models, unless a latency was met, and add the times to the result."""
    if pruned.report.latency is not None:
        return pruned
    place, length = device_of(dense), round(seq_len or pruned.report.mean_length) or LENGTH

    def time_both() -> dict[str, Any]:
        inputs = example_inputs(dense, batch_size, length)
        with frozen(dense), frozen(pruned.model), torch.no_grad():
            before, after = in_turns([partial(model, **inputs) for model in (dense, pruned.model)], place)
            shares = layer_shares(structure_of(dense), partial(dense, **inputs), place)
        return {
            "device": device_name(place), "measured": after.median / before.median, "dense_ms": 1e3 * before.median,
            "pruned_ms": 1e3 * after.median, "spread": max(before.unsteadiness, after.unsteadiness),
            "batch_size": batch_size, "seq_len": length,
            "dtype": dtype_name(dense.dtype),
            "threads": torch.get_num_threads() if place.type == "cpu" else None, "layer_time": shares,
        }  # fmt: skip

    return replace(pruned, report=replace(pruned.report, timing=on_first(time_both)))


def write_report(record: dict[str, Any], source: Source, target: Target, path: Path, *, force: bool = False) -> None:
    """Write the record of a run as a page; its `out` is the model's directory."""
    folder = Path(record["out"] or "DIR")
    saved = read_record(folder) if (folder / RECORD).is_file() else {}  # has the dense model's path
    settings = {
        "model": source.name, "data": data_name(source), "task": source.task, "samples": source.samples,
        "max_length": source.max_length, "pooling": source.pooling, "prefix": source.prefix, "dtype": source.dtype,
        "columns": [source.text_columns, source.label_column], "length": source.length,
        "shape": None if target.shape == "uneven" else target.shape, "multiple_of": target.multiple_of,
        "batch_size": target.batch_size, "seq_len": target.seq_len,
        "table": target.table is not None, "table_file": target.table,
        "methods": {record["method"]: record["settings"]},
    }  # fmt: skip
    whole = saved | record | {"command": command_of(record, settings, str(folder))}
    on_first(lambda: write_page(whole, folder, path, force=force))
