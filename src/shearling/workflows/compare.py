"""`shearling.compare`: two models on the same data, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shearling.errors import ModelError
from shearling.evaluation.compare import Comparison
from shearling.evaluation.compare import compare as compare_models
from shearling.workflows.progress import ProgressLike, watching


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    task: str | None = None,
    metric: str | None = None,
    index: str | None = None,
    pooling: str | None = None,
    prefix: str | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: ProgressLike = True,
) -> Comparison:
    """Compare two models on the same data: agreement, score, size, FLOPs and latency.

    first, second  model directories, or ids on the Hub
    data        a file of examples; scores need labels, the rest does not. By default the task's own dev set
    index       retrieval: `dense` has the first model embed the passages for both
    batch_size  examples at a time, also where the models are timed

    All others are those of `shearling.evaluate`.
    """
    for one in (first, second):
        if not isinstance(one, (str, os.PathLike)):
            raise ModelError(f"compare takes directories or ids on the Hub; save this {type(one).__name__} first.")
    with watching(progress) as watcher:
        return compare_models(
            str(first), str(second), None if data is None else str(data), task=task, limit=limit,
            batch_size=batch_size, max_length=max_length, text_columns=text_columns, label_column=label_column,
            device=device, trust_remote_code=trust_remote_code, watcher=watcher, metric=metric, index=index,
            pooling=pooling, prefix=prefix,
        )  # fmt: skip
