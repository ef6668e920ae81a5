"""`shearling.evaluate`: score a model on labelled data, optionally adding the score to a checkpoint's record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.load import read_record
from shearling.checkpoint.pretrained import load_model
from shearling.checkpoint.record import add_evaluation, base_of
from shearling.engine.progress import Watcher
from shearling.errors import DataError, ShearlingError
from shearling.evaluation.exam import Evaluation
from shearling.workflows.arguments import model_in
from shearling.workflows.progress import READING, ProgressLike, quiet, step, watching
from shearling.workflows.source import Loaded, Source, exam_of, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.workflows.arguments import Data

_log = logging.getLogger(__name__)
STAGES = READING | {"evaluate": 90.0}
SAME_SCORE = 0.01  # points; tolerance for the same model and rows with other batches


def evaluate(
    model: Any,
    data: Data | None = None,
    *,
    tokenizer: Any = None,
    task: str | None = None,
    metric: str | None = None,
    index: str | None = None,
    pooling: str | None = None,
    prefix: str | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    compile: bool = False,  # noqa: A002 - the name users know from torch
    trust_remote_code: bool = False,
    progress: ProgressLike = True,
) -> Evaluation:
    """Score a model, dense or pruned, on labelled data.

    model       a model as in `shearling.prune`, or its result
    data        labelled rows: a file name, a `datasets.Dataset`, or a list of dicts; default: the task's own dev set
    tokenizer   default: the model's own
    task        sst2, mnli, squad, ... or classification, sts, retrieval, ...; default: by the model's head
    metric      another metric of the task, such as r@1
    index       retrieval: the model that embeds the passages: `dense`, or a directory; default: the scored model
    pooling     of an embedding model whose files do not have it: mean, cls, last, max, weighted_mean
    prefix      of an encoder-decoder's sources, such as "summarize: "; default: that of its configuration
    text_columns, label_column  names of the columns, if the task's defaults do not match
    limit       score only the first `limit` rows
    max_length  truncate texts to this many tokens
    batch_size  default: suited to the device
    device, dtype  for a model that is loaded by name: auto, cpu, cuda; float32, bfloat16, float16
    compile     use torch.compile
    trust_remote_code  run custom code of the model
    progress    True, False, or a callback (stage, done, total)
    """
    source = Source(
        model_in(model), data, task, text_columns=text_columns, label_column=label_column, max_length=max_length,
        batch_size=batch_size, device=device, dtype=dtype, trust_remote_code=trust_remote_code, metric=metric,
        index=index, pooling=pooling, tokenizer=tokenizer, prefix=prefix,
    )  # fmt: skip
    with watching(progress, STAGES) as watcher:
        return evaluate_source(source, limit=limit, compiled=compile, watcher=watcher)


def evaluate_source(
    source: Source, *, limit: int | None = None, compiled: bool = False, watcher: Watcher = quiet
) -> Evaluation:
    """Score a source on its data."""
    loaded = open_source(source, watcher=watcher)
    with step(watcher, "read"):
        exam = exam_of(source, loaded, source.data, limit=limit, dense=_dense(source, loaded))
    return exam.take(loaded.model, compile=compiled, progress=partial(watcher, "evaluate"))


def _dense(source: Source, loaded: Loaded) -> PreTrainedModel | None:
    """The dense model of a checkpoint if needed (for encoder-decoders, and as an index) and known."""
    if loaded.task.kind != "seq2seq" and source.index != "dense":
        return None
    base = base_of(Path(source.name)) if source.name else None
    if base is None and source.index == "dense":
        raise DataError(
            f"--index dense needs the model that {source.name} was pruned from, which its record does not lead to; "
            "give its directory instead: --index DIRECTORY"
        )
    return None if base is None else load_model(base, **source.loading)


def record_evaluation(
    source: Source, *, limit: int | None = None, compiled: bool = False, watcher: Watcher = quiet
) -> Evaluation:
    """Score a checkpoint and add the score to its record and card, with the dense model's score.

    The latter is read from the record, or else measured if the dense model is on this machine.
    """
    folder = Path(source.model)
    record = read_record(folder)  # raises early if it is not a checkpoint
    base = base_of(folder)
    result = evaluate_source(source, limit=limit, compiled=compiled, watcher=watcher)
    dense = known_dense(record, result.to_json())
    if dense is None and base is not None:
        add_evaluation(folder, result.to_json())  # also if scoring the dense model fails
        try:
            original = replace(source, model=base, index=None if source.index == "dense" else source.index)
            dense = evaluate_source(original, limit=limit, compiled=compiled, watcher=watcher).value
        except ShearlingError as error:
            _log.warning("the dense model %s could not be scored: %s", base, error)
    result = replace(result, dense=dense)
    add_evaluation(folder, result.to_json())
    return result


def known_dense(record: dict[str, Any], score: dict[str, Any]) -> float | None:
    """The dense model's score on the same rows from a record, if the pruned model's score matches too."""
    same = ("task", "metric", "examples", "rows")
    for entry in record.get("evaluations") or []:
        dense = entry.get("dense")
        known = dense is not None and score.get("rows") and all(entry.get(name) == score[name] for name in same)
        if known and abs(entry["value"] - score["value"]) <= SAME_SCORE:
            return float(dense)
    return None
