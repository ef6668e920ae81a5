"""`shearling retrain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shearling.cli import options as o


def retrain(
    directory: o.Directory,
    out: Annotated[Path, o.output("--out", "-o", help="Output directory for the retrained model.")],
    data: o.Data = None,
    task: o.Task = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Labelled rows for scoring the model before and after.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="The dense model, for distillation.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 3.0,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-5,
    alpha: Annotated[
        float, typer.Option(help="With --teacher: weight of its outputs against the labels, in [0, 1].")
    ] = 0.5,
    temperature: Annotated[float, typer.Option(help="With --teacher: softmax temperature.")] = 2.0,
    text_columns: o.TextColumns = None,
    label_column: o.LabelColumn = None,
    limit: o.Limit = None,
    seed: o.Seed = 0,
    max_length: o.MaxLength = None,
    batch_size: Annotated[int, typer.Option(help="Batch size of the training.", min=1)] = 32,
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    force: o.Force = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Retrain a pruned model on labelled data; an interrupted run is resumed."""
    from shearling.cli.console import emit, say, tell
    from shearling.workflows.progress import watching
    from shearling.workflows.retrain import STAGES, retrain_source
    from shearling.workflows.source import Source
    from shearling.workflows.training import Recipe

    source = Source(
        str(directory), data, task, text_columns=o.columns(text_columns), label_column=label_column,
        max_length=max_length, batch_size=batch_size, seed=seed, device=device, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    recipe = Recipe(epochs, lr, batch_size, seed, alpha, temperature)
    with watching(not quiet, STAGES) as watcher:
        record = retrain_source(
            source, recipe, out, teacher=teacher, evaluation=evaluation, limit=limit, force=force, watcher=watcher
        )
    if as_json:
        emit(record)
        return
    facts = record["retrained"]
    tell(f"{facts['steps']:,} steps in {facts['seconds']:.1f} s, mean loss {facts['loss']:.4f}", quiet=quiet)
    if facts["before"]:
        before, after = facts["before"], facts["after"]
        tell(f"{before['metric']} {before['value']:.2f} -> {after['value']:.2f}", quiet=quiet)
    say(f"written to {out}", quiet=quiet)
