"""`shearling.compare`: compare two models on the same data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shearling.engine.progress import Watcher
from shearling.errors import InputError
from shearling.evaluation.compare import Comparison, Side
from shearling.evaluation.compare import compare as compare_sides
from shearling.pipeline import Pruned
from shearling.workflows.arguments import model_in
from shearling.workflows.progress import READING, ProgressLike, quiet, step, watching
from shearling.workflows.source import Source, exam_of, open_source, rows_of, text_columns_of

if TYPE_CHECKING:
    from shearling.workflows.arguments import Data

BATCH_SIZE = 32
STAGES = READING | {"model 1": 50.0, "model 2": 35.0, "time": 5.0}


def compare(
    first: Any,
    second: Any,
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
    batch_size: int = BATCH_SIZE,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: ProgressLike = True,
) -> Comparison:
    """Compare two models on the same data: agreement, score, size, FLOPs and latency.

    >>> shearling.compare("my-model", pruned, "dev.jsonl")  # doctest: +SKIP

    first, second  models, as in `shearling.evaluate`
    data        examples: a file name, texts, pairs, a `datasets.Dataset`, a list of dicts; only scores need labels.
                Default: the task's own dev set
    tokenizer   of both models; default: each model's own
    index       retrieval: with `dense` the first model embeds the passages for both
    batch_size  for scoring and timing

    The others are those of `shearling.evaluate`.
    """
    source = Source(
        first, data, task, text_columns=text_columns, label_column=label_column, max_length=max_length,
        batch_size=batch_size, device=device, trust_remote_code=trust_remote_code, metric=metric, index=index,
        pooling=pooling, tokenizer=tokenizer, prefix=prefix,
    )  # fmt: skip
    with watching(progress, STAGES) as watcher:
        return compare_sources(source, second, limit=limit, watcher=watcher)


def compare_sources(source: Source, second: Any, *, limit: int | None = None, watcher: Watcher = quiet) -> Comparison:
    """Compare the model of a source with a second one, on the data of the source."""
    if source.index not in (None, "dense"):
        raise InputError(f"--index {source.index} is not known here; with `dense` the first model embeds the passages")
    watcher("load", 0, 2)
    names, opened = [], []
    for number, model in enumerate((source.model, second), start=1):
        pruned = isinstance(model, Pruned)
        one = replace(source, model=model_in(model))
        names.append("pruned" if pruned else one.name or type(model).__name__)
        opened.append(open_source(one))
        watcher("load", number, 2)
    given = (source.model, second)
    folders = [str(model) if isinstance(model, (str, os.PathLike)) else None for model in given]
    if names[0] == names[1] and not all(folders):
        names = ["first", "second"]
    models, task = [one.model for one in opened], opened[0].task
    with step(watcher, "read"):
        rows = rows_of(source.data, task, split="dev")
        columns = source.text_columns or text_columns_of(source.data)
        asked = replace(source, batch_size=source.batch_size or BATCH_SIZE, text_columns=columns)
        exams = [exam_of(asked, replace(one, task=task), rows, limit=limit, dense=models[0]) for one in opened]
    return compare_sides(list(map(Side, names, models, exams, folders)), watcher)
