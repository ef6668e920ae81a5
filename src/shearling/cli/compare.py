"""`shearling compare`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from shearling.cli import options as o


def compare(
    first: Annotated[
        str, typer.Argument(metavar="FIRST", help="A model directory, or an id on the Hub.", show_default=False)
    ],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another one, dense or pruned.", show_default=False)],
    data: o.Data = None,
    task: o.Task = None,
    metric: o.Metric = None,
    index: o.Index = None,
    pooling: o.Pooling = None,
    text_columns: o.TextColumns = None,
    label_column: o.LabelColumn = None,
    limit: Annotated[Optional[int], typer.Option(help="Only the first so many rows.", min=1)] = None,  # noqa: UP045
    max_length: o.MaxLength = None,
    batch_size: o.BatchSize = 32,
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Compare two models on the same data: agreement, score, size, operations and latency side by side."""
    from shearling.cli.console import emit, watching
    from shearling.cli.pictures import print_comparison
    from shearling.evaluation.compare import compare as run

    with watching(quiet=quiet) as watcher:
        result = run(
            first,
            second,
            data,
            task=task,
            limit=limit,
            batch_size=batch_size,
            max_length=max_length,
            text_columns=o.columns(text_columns),
            label_column=label_column,
            device=device,
            trust_remote_code=trust_remote_code,
            watcher=watcher,
            metric=metric,
            index=index,
            pooling=pooling,
        )
    if as_json:
        emit(result.to_json())
    else:
        print_comparison(result)
