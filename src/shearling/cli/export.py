"""`shearling export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from shearling.cli import options as o


def export(
    model: o.Model,
    out: Annotated[Path, typer.Option(help="The file to write.", show_default=False)],
    format_: Annotated[str, typer.Option("--format", help="onnx, or exported (a torch.export program).")] = "onnx",
    fp16: Annotated[bool, typer.Option("--fp16", help="Half precision.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="onnx: dynamic quantisation to 8-bit integers.")] = False,
    data: o.Data = None,
    task: o.Task = None,
    dense: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A model to compare size and latency with; by default the one it was pruned from."),
    ] = None,
    trust_remote_code: o.TrustRemoteCode = False,
    force: o.Force = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Write MODEL, dense or pruned, as one file that runs without transformers, checked against PyTorch."""
    from shearling.cli.console import emit, say, watching
    from shearling.export.result import describe
    from shearling.workflows.export import export_model

    if fp16 and int8:
        raise typer.BadParameter("give one of --fp16 and --int8", param_hint="--int8")
    with watching(quiet=quiet) as watcher:
        result = export_model(
            model,
            out,
            format=format_,
            precision="float16" if fp16 else "int8" if int8 else "float32",
            data=data,
            task=task,
            dense=dense,
            force=force,
            trust_remote_code=trust_remote_code,
            watcher=watcher,
        )
    if as_json:
        emit(result.to_json())
    else:
        say(describe(result), quiet=quiet)
