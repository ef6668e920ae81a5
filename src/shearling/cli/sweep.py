"""`shearling sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling sweep my-model --data train.jsonl --eval dev.jsonl --flops 0.7,0.5,0.3 -o sweep",
    "shearling sweep my-model --data train.jsonl --eval dev.jsonl --methods surgeon,paper --seeds 0,1,2 -o sweep",
    "shearling sweep my-model --data train.jsonl --eval dev.jsonl --latency 0.7,0.5 --table table.json -o sweep",
)


@o.reads
def sweep(
    model: o.Model,
    out: Annotated[Path, o.output("--out", "-o", help="Directory for results.json, curve.svg and report.html.")],
    reading: o.DataOptions,
    evaluation: Annotated[str | None, o.inputs("--eval", help="Labelled rows for scoring every model.")] = None,
    flops: Annotated[str | None, o.constraint(help="Budgets, comma-separated: 0.7,0.5,0.3.")] = None,
    params: Annotated[str | None, o.constraint(help="Budgets of parameters instead.")] = None,
    latency: Annotated[str | None, o.constraint(help="Budgets of latency, with --table.")] = None,
    table: Annotated[Path | None, o.constraint(help="A table from `shearling profile`.")] = None,
    shape: o.Shape = "uneven",
    methods: Annotated[str, o.method(help="Methods, comma-separated.")] = "surgeon",
    seeds: Annotated[
        str, o.method("--seeds", "--seed", help="Seeds, comma-separated; each draws its own sample.")
    ] = "0",
    save: Annotated[bool, o.output("--save", help="Keep the pruned models under OUT/models.")] = False,
    timing: Annotated[bool, o.advanced("--timing/--no-timing", help="Time every model against the dense one.")] = True,
    multiple_of: Annotated[int | None, o.method(help="Round filter counts.", min=1)] = None,
    samples: o.Samples = "auto",
    flops_length: o.FlopsLength = None,
    length: o.OldLength = None,
    batch_size: o.BatchSize = None,
    dtype: o.Dtype = None,
    force: Annotated[bool, o.output("--force", help="Discard the sweep in OUT and start afresh.")] = False,
    dry_run: Annotated[bool, o.output("--dry-run", help="Show what would be done; write nothing.")] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Prune MODEL to many budgets by several methods, score each, and draw the curve; resumes an interrupted sweep."""
    from shearling.cli.console import emit, tell
    from shearling.methods.ranges import checked_shape
    from shearling.workflows.grid import grid_of
    from shearling.workflows.progress import watching
    from shearling.workflows.sweep import STAGES, describe_planned, describe_sweep, sweep_source

    grid = grid_of(
        methods, seeds, multiple_of, table, checked_shape(shape), flops=flops, params=params, latency=latency
    )
    source = reading.source(
        model, batch_size=batch_size, samples=o.samples(samples), seed=grid.seeds[0], dtype=dtype,
        length=o.renamed("--length", "--flops-length", length, flops_length),
    )  # fmt: skip
    with watching(not quiet and not dry_run, STAGES) as watcher:
        record = sweep_source(
            source, grid, out, evaluation=evaluation, limit=reading.limit, save=save, timing=timing, force=force,
            dry_run=dry_run, watcher=watcher,
        )  # fmt: skip
    if as_json:
        emit(record)
    else:
        tell((describe_planned if dry_run else describe_sweep)(record), quiet=quiet)
