"""`shearling profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling profile my-model -o table.json",
    "shearling profile my-model --batch-size 1 --seq-len 64 --device cpu -o cpu.json --plot cpu.svg",
    "shearling profile my-model --device cuda --runtime graphs -o gpu.json",
)


def profile(
    model: o.Model,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Where to write the table.", show_default=False, rich_help_panel=o.OUTPUT),
    ],
    batch_size: Annotated[
        int, typer.Option(help="Examples in a batch, as the model will run.", min=1, rich_help_panel=o.INPUT)
    ] = 32,
    seq_len: Annotated[
        int, typer.Option(help="Tokens in an example, as the model will run.", min=1, rich_help_panel=o.INPUT)
    ] = 128,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of the CPU; torch's own choice by default.", min=1, rich_help_panel=o.ADVANCED),
    ] = None,
    runtime: Annotated[
        str,
        typer.Option(
            help="How the model will run: `eager`, or `graphs` for CUDA graphs.",
            metavar="NAME",
            rich_help_panel=o.INPUT,
        ),
    ] = "eager",
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="How long to measure, about; 60 by default.", min=1.0, rich_help_panel=o.ADVANCED),
    ] = None,
    budget: Annotated[Optional[float], typer.Option("--budget", hidden=True, min=1.0)] = None,  # noqa: UP045
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Draw the table and the fit: svg, png or pdf.", rich_help_panel=o.OUTPUT),
    ] = None,
    trust_remote_code: o.TrustRemoteCode = False,
    force: o.Force = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Time MODEL's own layers here, with fewer and fewer units, for `prune --latency`."""
    from shearling.cli.console import emit, say, tell, watching
    from shearling.workflows.profile import STAGES, profile_source

    spent = o.renamed("--budget", "--seconds", budget, seconds) or 60.0
    with watching(STAGES, quiet=quiet) as watcher:
        table = profile_source(
            model, out=out, picture=plot, force=force, batch_size=batch_size, seq_len=seq_len, device=device,
            dtype=dtype, threads=threads, runtime=runtime, seconds=spent, trust_remote_code=trust_remote_code,
            progress=watcher,
        )  # fmt: skip
    if as_json:
        emit(table.to_json() | {"out": str(out)})
    else:
        tell(str(table), quiet=quiet)
        say(f"written to {out}" + ("" if plot is None else f", drawn in {plot}"), quiet=quiet)
