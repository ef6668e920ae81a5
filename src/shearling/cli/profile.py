"""`shearling profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from shearling.cli import options as o


def profile(
    model: o.Model,
    out: Annotated[Path, typer.Option(help="Where to write the table.", show_default=False)],
    batch_size: Annotated[int, typer.Option(help="Examples in a batch, as the model will run.", min=1)] = 32,
    seq_len: Annotated[int, typer.Option(help="Tokens in an example, as the model will run.", min=1)] = 128,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU; torch's own choice unless given.", min=1)
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="How the model will run: `eager`, or `graphs` for CUDA graphs.", metavar="NAME")
    ] = "eager",
    budget: Annotated[float, typer.Option(help="Seconds to spend, about.", min=1.0)] = 60.0,
    plot: Annotated[Optional[Path], typer.Option(help="Draw the table and the fit: svg, png or pdf.")] = None,  # noqa: UP045
    trust_remote_code: o.TrustRemoteCode = False,
    force: o.Force = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Time MODEL's own layers here, with fewer and fewer units, for `prune --latency`."""
    from shearling.cli.console import emit, say, watching
    from shearling.workflows.profile import Setting, profile_source

    setting = Setting(batch_size, seq_len, device, dtype, threads, runtime, budget, trust_remote_code)
    with watching(quiet=quiet) as watcher:
        table = profile_source(model, setting, out=out, picture=plot, force=force, watcher=watcher)
    if as_json:
        emit(table.to_json() | {"out": str(out)})
    else:
        also = "" if plot is None else f"\n  drawn in {plot}"
        say(f"{table}\n  written to {out}{also}", quiet=quiet)
