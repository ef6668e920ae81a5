"""`shearling evaluate`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from shearling.cli import options as o


def evaluate(
    model: o.Model,
    data: o.Data = None,
    task: o.Task = None,
    metric: o.Metric = None,
    index: o.Index = None,
    pooling: o.Pooling = None,
    text_columns: o.TextColumns = None,
    label_column: o.LabelColumn = None,
    limit: Annotated[Optional[int], typer.Option(help="Only the first so many rows.", min=1)] = None,  # noqa: UP045
    max_length: o.MaxLength = None,
    batch_size: o.BatchSize = 64,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Also write the score into the checkpoint's record and model card.")
    ] = False,
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Score MODEL, dense or pruned, on labelled data."""
    from shearling.cli.console import emit, say, watching
    from shearling.workflows.source import Source, evaluate_source, record_evaluation

    source = Source(
        model, data, task, o.columns(text_columns), label_column, max_length, batch_size, device=device, dtype=dtype,
        trust_remote_code=trust_remote_code, metric=metric, index=index, pooling=pooling,
    )  # fmt: skip
    with watching(quiet=quiet) as watcher:
        score = record_evaluation if record else evaluate_source
        result = score(source, limit=limit, compiled=compiled, watcher=watcher)
    if as_json:
        emit(result.to_json())
    else:
        say(str(result), quiet=quiet)
