"""`shearling prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from shearling.cli import options as o


def prune(
    model: o.Model,
    data: o.Data = None,
    task: o.Task = None,
    flops: Annotated[Optional[float], typer.Option(help="Keep this share of the layers' FLOPs, in (0, 1].")] = None,  # noqa: UP045
    params: Annotated[Optional[float], typer.Option(help="Keep this share of the layers' parameters.")] = None,  # noqa: UP045
    latency: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Take this share of the model's time, by a latency table."),
    ] = None,
    table: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="What `shearling profile` wrote; without it, the model is profiled first."),
    ] = None,
    correct: Annotated[
        bool, typer.Option("--correct/--no-correct", help="Choose again where the model is slower than the table says.")
    ] = True,
    max_drop: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Find the smallest budget that loses at most so many points on --eval."),
    ] = None,
    evaluation: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--eval", help="With --max-drop: labelled rows to score on."),
    ] = None,
    by: Annotated[str, typer.Option(help="With --max-drop: a budget of flops, params or latency.")] = "flops",
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="With --max-drop: score on the first so many rows.", min=1),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Where to write the pruned model.")] = None,  # noqa: UP045
    method: Annotated[str, typer.Option(help="surgeon (default), or paper.")] = "surgeon",
    multiple_of: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Round filter counts to multiples of this; 8 with --latency, else 1.", min=1),
    ] = None,
    labels: Annotated[bool, typer.Option("--labels", help="surgeon: use the data's labels.")] = False,
    refit: Annotated[bool, typer.Option("--refit/--no-refit", help="surgeon: refit the output projections.")] = True,
    realign: Annotated[
        bool, typer.Option("--realign/--no-realign", help="surgeon: realign what goes into the units.")
    ] = True,
    importance: Annotated[str, typer.Option(help="paper: fisher, magnitude, gradient or random.")] = "fisher",
    allocation: Annotated[str, typer.Option(help="paper: searched or uniform.")] = "searched",
    rearrange: Annotated[bool, typer.Option("--rearrange/--no-rearrange", help="paper: rearrange the masks.")] = True,
    tune: Annotated[bool, typer.Option("--tune/--no-tune", help="paper: tune the masks.")] = True,
    drop_sublayers: Annotated[
        bool,
        typer.Option(
            "--drop-sublayers/--no-drop-sublayers",
            help="paper: drop whole sublayers where their overheads alone exceed the latency.",
        ),
    ] = True,
    metric: o.Metric = None,
    index: o.Index = None,
    pooling: o.Pooling = None,
    text_columns: o.TextColumns = None,
    label_column: o.LabelColumn = None,
    seed: o.Seed = 0,
    samples: o.Samples = 2048,
    max_length: o.MaxLength = None,
    length: o.Length = None,
    batch_size: o.AutoBatchSize = None,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    trust_remote_code: o.TrustRemoteCode = False,
    force: o.Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its cost; write nothing.")] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Prune MODEL to a constraint, without retraining, and write a smaller model directory."""
    from shearling.cli.console import emit, say, watching
    from shearling.methods import configured
    from shearling.workflows.max_drop import describe_drop, drop_of
    from shearling.workflows.source import Source, Target, prune_source

    if out is None and not dry_run:
        raise typer.BadParameter("say where to write the pruned model, or use --dry-run", param_hint="--out")
    source = Source(
        model, data, task, o.columns(text_columns), label_column, max_length, batch_size, samples, seed, device, dtype,
        trust_remote_code, length, metric, index, pooling,
    )  # fmt: skip
    chosen = configured(
        method, labels=labels, refit=refit, realign=realign, importance=importance, allocation=allocation,
        rearrange=rearrange,
        tune=tune, drop_sublayers=drop_sublayers,
    )  # fmt: skip
    with watching(quiet=quiet) as watcher:
        pruned, record = prune_source(
            source,
            Target(flops, params, multiple_of, latency, table, correct),
            chosen,
            out=None if dry_run else out,
            drop=drop_of(max_drop, evaluation, by, limit),
            force=force,
            watcher=watcher,
        )
    if as_json:
        emit(record)
    else:
        say(str(pruned), quiet=quiet)
        if "max_drop" in record:
            say(f"\n{describe_drop(record['max_drop'])}", quiet=quiet)
        say("\n  not written (--dry-run)" if dry_run else f"\n  written to {out}", quiet=quiet)
