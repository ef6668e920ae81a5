"""`shearling profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling profile my-model -o table.json",
    "shearling profile my-model --batch-size 1 --seq-len 64 --device cpu -o cpu.json --plot cpu.svg",
    "shearling profile my-model --device cuda --runtime graphs -o gpu.json",
)


def profile(
    model: o.Model,
    out: Annotated[Path, o.output("--out", "-o", help="Output file for the table.", show_default=False)],
    batch_size: Annotated[int, o.inputs(help="Batch size in deployment.", min=1)] = 32,
    seq_len: Annotated[int, o.inputs(help="Tokens per example in deployment.", min=1)] = 128,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    threads: Annotated[int | None, o.advanced(help="CPU threads; default: torch's setting.", min=1)] = None,
    runtime: Annotated[
        str, o.inputs(help="Runtime in deployment: `eager`, or `graphs` for CUDA graphs.", metavar="NAME")
    ] = "eager",
    seconds: Annotated[
        float | None, o.advanced(help="Approximate duration of the measurement; default: 60.", min=1.0)
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", hidden=True, min=1.0)] = None,
    plot: Annotated[Path | None, o.output(help="Draw the table and the fit: svg, png or pdf.")] = None,
    trust_remote_code: o.TrustRemoteCode = False,
    force: o.Force = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Time MODEL on this machine with varying numbers of units, for `prune --latency`."""
    from shearling.cli.console import emit, say, tell
    from shearling.workflows.profile import STAGES, profile_source
    from shearling.workflows.progress import watching

    spent = o.renamed("--budget", "--seconds", budget, seconds) or 60.0
    with watching(not quiet, STAGES) as watcher:
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
