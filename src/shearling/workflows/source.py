"""Whole jobs on files and directories: what the commands do, without a terminal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.load import read_record
from shearling.checkpoint.pretrained import check_prunable, is_remote, load_model, load_reader, named_device
from shearling.checkpoint.record import add_evaluation, base_of
from shearling.checkpoint.sentence import companions
from shearling.costs import ratio_of
from shearling.data import find_task, infer_task, load_rows, read_rows
from shearling.engine.progress import Watcher
from shearling.errors import ConstraintError, DataError, ModelError, ShearlingError
from shearling.files import check_writable
from shearling.latency.meet import checked_table
from shearling.latency.table import load_table
from shearling.methods import Method
from shearling.models.pooling import pooling_of
from shearling.models.structure import structure_of
from shearling.pipeline import MOST_SAMPLES as SAMPLES
from shearling.pipeline import Plan, Pruned, measure

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from shearling.data import Batches, Rows, Task
    from shearling.data.encoder import Labels
    from shearling.evaluation.exam import Evaluation, Exam
    from shearling.workflows.max_drop import Drop


_log = logging.getLogger(__name__)

SCORED_TOKENS = 2**16  # of a batch
SAME_SCORE = 0.01  # points; one model's scores on the same rows differ by less, whatever the batches


@dataclass(frozen=True)
class Source:
    """Where the model and its examples come from, and how to read them."""

    model: str
    data: str | None = None
    task: str | None = None
    text_columns: Sequence[str] | None = None
    label_column: str | None = None
    max_length: int | None = None
    batch_size: int | None = None  # what suits the device, unless given
    samples: int = SAMPLES
    seed: int = 0
    device: str = "auto"
    dtype: str | None = None
    trust_remote_code: bool = False
    length: float | None = None  # tokens of an example, for counting FLOPs; the sample's mean unless given
    metric: str | None = None  # the task's usual one, unless given
    index: str | None = None  # of a search: `dense`, or a model that embeds the passages; else the model scored
    pooling: str | None = None  # of an embedding model, where its files do not say it

    @property
    def examples_per_batch(self) -> int:
        """As asked for, or many on a GPU, which would idle otherwise, and few on a CPU."""
        return self.batch_size or (512 if named_device(self.device).type == "cuda" else 32)

    def scored_per_batch(self, task: Task) -> int:
        """As asked for, or as many as fit into any memory at their longest: scoring does not try again with fewer."""
        most = SCORED_TOKENS // (self.max_length or task.max_length)
        return self.batch_size or max(1, min(self.examples_per_batch, most))


@dataclass(frozen=True)
class Loaded:
    """A source, read; `batches` is a sample of `rows`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: Task
    rows: Rows
    batches: Batches


@dataclass(frozen=True)
class Target:
    """What the pruned model must meet."""

    flops: float | None = None
    params: float | None = None
    multiple_of: int | None = None
    latency: float | None = None
    table: Path | None = None
    correct: bool = True

    def checked(self) -> Target:
        """Complain about ratios before any work is done."""
        given = {"flops": self.flops, "params": self.params, "latency": self.latency}
        for name, value in given.items():
            if value is not None:
                ratio_of(f"--{name}", value)
        if all(value is None for value in given.values()):
            raise ConstraintError(
                "Give a constraint: --flops 0.5, --params 0.5 or --latency 0.5 (several may be given together)."
            )
        if self.table is not None:
            if self.latency is None:
                raise ConstraintError("--table is of use with --latency only; ask for one, such as --latency 0.5.")
            load_table(self.table)
        return self


def read_source(source: Source, *, labels: Labels) -> Loaded:
    """Load the model, its tokenizer and a sample of the data."""
    check_early(source)
    check_prunable(source.model, trust_remote_code=source.trust_remote_code)
    model = _model_of(source, source.model)
    tokenizer = load_reader(source.model, model, trust_remote_code=source.trust_remote_code)
    task = find_task(source.task) if source.task else infer_task(model)
    if source.data is None and task.hub is None:
        raise ModelError(f"No data: give --data FILE (the task '{task.name}' has no data set of its own on the Hub).")
    rows = load_rows(source.data, task)
    batches = sample_batches(source, rows, tokenizer, task, model, labels=labels)
    return Loaded(model, tokenizer, task, rows, batches)


def check_early(source: Source, *more: str | None) -> None:
    """Look at the task's name and at the start of every data file before anything large is read."""
    from shearling.data import find_task

    if source.task:
        find_task(source.task)
    for data in (source.data, *more):
        if data is not None:
            read_rows(data, limit=1)


def sample_batches(
    source: Source,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    model: PreTrainedModel,
    *,
    labels: Labels,
) -> Batches:
    """Draw the sample that the source asks for."""
    from shearling.data import encode

    return encode(
        rows,
        tokenizer,
        task,
        model_config=model.config,
        max_length=source.max_length,
        batch_size=source.examples_per_batch,
        samples=source.samples,
        seed=source.seed,
        labels=labels,
        text_columns=source.text_columns,
        label_column=source.label_column,
        pooling=pooling_of(model),
    )


def _model_of(source: Source, name: str) -> PreTrainedModel:
    return load_model(
        name,
        device=source.device,
        dtype=source.dtype,
        trust_remote_code=source.trust_remote_code,
        pooling=source.pooling,
    )


def exam_of(source: Source, loaded: Loaded, evaluation: str | None, *, limit: int | None = None) -> Exam:
    """The rows to score this model and its pruned copies on; a known task's dev split where no file is given."""
    from shearling.evaluation.exam import make_exam

    if evaluation is None and loaded.task.hub is None:
        raise DataError(
            f"Nothing to score on: give --eval FILE (the task '{loaded.task.name}' has no dev set of its own)."
        )
    return make_exam(
        loaded.model,
        loaded.tokenizer,
        load_rows(evaluation, loaded.task, split="dev"),
        loaded.task,
        batch_size=source.scored_per_batch(loaded.task),
        max_length=source.max_length,
        text_columns=source.text_columns,
        label_column=source.label_column,
        limit=limit,
        metric=source.metric,
        index=_index_of(source, loaded.model),
    )


def _index_of(source: Source, dense: PreTrainedModel) -> PreTrainedModel | None:
    """The model that embeds the passages of a search; None where every model embeds its own."""
    if source.index is None:
        return None
    return dense if source.index == "dense" else _model_of(source, source.index)


def measure_source(
    source: Source,
    method: Method,
    *,
    target: Target | None = None,
    written: bool = True,
    watcher: Watcher | None = None,
) -> tuple[Plan, Loaded]:
    """Read a source and measure it, once it is clear that the target's latency table is of this model.

    written  the pruned model is to be a directory
    """
    loaded = read_source(source, labels=labels_for(method))
    if written and is_remote(loaded.model):
        raise ModelError(
            f"{type(loaded.model).__name__} is a class that came with the model, and a pruned copy of it could not be "
            "loaded from a directory. Prune it from Python, where the result can be used at once: "
            "shearling.prune(model, data, flops=0.5).model."
        )
    if target is not None:
        checked_table(target.table, target.latency, structure_of(loaded.model))
    plan = measure(
        loaded.model,
        loaded.batches,
        method=method,
        samples=source.samples,
        seed=source.seed,
        length=source.length,
        watcher=watcher,
    )
    if is_remote(loaded.model) or is_remote(loaded.model.config) or is_remote(loaded.tokenizer):
        plan = replace(plan, warnings=[*plan.warnings, "code that came with the model was run (--trust-remote-code)"])
    return plan, loaded


def prune_source(
    source: Source,
    target: Target,
    method: Method,
    *,
    out: Path | None,
    drop: Drop | None = None,
    force: bool = False,
    watcher: Watcher | None = None,
) -> tuple[Pruned, dict[str, Any]]:
    """Prune a model directory; writes `out` unless it is None. Also gives the record that `--json` prints.

    drop  find the smallest budget that loses no more than this, instead of meeting the target's constraint
    """
    target = target.checked() if drop is None else drop.checked(target)
    if out is not None:
        check_writable(out, force=force, keep=(source.model,))
    if drop is not None:
        check_early(source, drop.evaluation)
    plan, loaded = measure_source(source, method, target=target, written=out is not None, watcher=watcher)
    if drop is None:
        pruned = cut(plan, target)
    else:
        pruned = drop.meet(plan, target, exam_of(source, loaded, drop.evaluation, limit=drop.limit), watcher)
    if out is not None:
        keep(pruned, source, loaded, out, force=force)
    return pruned, pruned.report.to_json() | {"out": None if out is None else str(out)}


def cut(plan: Plan, target: Target) -> Pruned:
    """Prune to a target."""
    return plan.prune(
        flops=target.flops,
        params=target.params,
        latency=target.latency,
        table=target.table,
        correct=target.correct,
        multiple_of=target.multiple_of,
    )


def keep(pruned: Pruned, source: Source, loaded: Loaded, out: Path, *, force: bool = False) -> None:
    """Write a pruned model, with the files that lie beside the dense one."""
    pruned.save(out, source=companions(source.model) or loaded.tokenizer, force=force)


def evaluate_source(
    source: Source, *, limit: int | None = None, compiled: bool = False, watcher: Watcher | None = None
) -> Evaluation:
    """Score a model directory on labelled data."""
    from shearling.evaluation.exam import evaluate

    check_early(source)
    model = _model_of(source, source.model)
    if source.index == "dense":
        source = replace(source, index=_original(source.model))
    task = find_task(source.task) if source.task else infer_task(model)
    return evaluate(
        model,
        load_reader(source.model, model, trust_remote_code=source.trust_remote_code),
        load_rows(source.data, task, split="dev"),
        task,
        batch_size=source.scored_per_batch(task),
        max_length=source.max_length,
        text_columns=source.text_columns,
        label_column=source.label_column,
        device=source.device,
        compile=compiled,
        limit=limit,
        progress=None if watcher is None else partial(watcher, "evaluate"),
        metric=source.metric,
        index=_index_of(source, model),
    )


def _original(name: str) -> str:
    """The dense model that a checkpoint was pruned from, where it can be found."""
    base = base_of(Path(name))
    if base is None:
        raise DataError(
            f"--index dense needs the model that {name} was pruned from, and its record does not say where that is "
            "now; give its directory instead: --index DIRECTORY"
        )
    return base


def record_evaluation(
    source: Source, *, limit: int | None = None, compiled: bool = False, watcher: Watcher | None = None
) -> Evaluation:
    """Score a checkpoint and write that into its record and card, beside the dense model's score.

    The latter is taken from the record where it is there, else from the dense model where it lies on this machine.
    """
    folder = Path(source.model)
    record = read_record(folder)  # before the work: is it a checkpoint of ours?
    base = base_of(folder)
    result = evaluate_source(source, limit=limit, compiled=compiled, watcher=watcher)
    dense = known_dense(record, result.to_json())
    if dense is None and base is not None:
        add_evaluation(folder, result.to_json())  # whatever becomes of the other
        try:
            original = replace(source, model=base, index=None if source.index == "dense" else source.index)
            dense = evaluate_source(original, limit=limit, compiled=compiled, watcher=watcher).value
        except ShearlingError as error:
            _log.warning("the dense model %s could not be scored: %s", base, error)
    result = replace(result, dense=dense)
    add_evaluation(folder, result.to_json())
    return result


def known_dense(record: dict[str, Any], score: dict[str, Any]) -> float | None:
    """What a record says the dense model scored on the rows of `score`, where the pruned one's score agrees too."""
    same = ("task", "metric", "examples", "rows")
    for entry in record.get("evaluations") or []:
        if not score.get("rows") or any(entry.get(name) != score[name] for name in same):
            continue
        value, dense = (entry.get(name) for name in ("value", "dense"))
        if not isinstance(value, (int, float)) or not isinstance(dense, (int, float)):
            continue
        if abs(value - score["value"]) <= SAME_SCORE:
            return float(dense)
    return None


def labels_for(*methods: Method) -> Labels:
    """What to do about the data's labels: none that no method uses is looked at."""
    wants = {method.wants_labels for method in methods}
    return "require" if "require" in wants else "optional" if "prefer" in wants else "ignore"
