"""`shearling export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling export my-model-50 --format list",
    "shearling export my-model-50 -o model.onnx",
    "shearling export my-model-50 -o model-int8.onnx --int8 --data texts.jsonl --eval dev.jsonl",
)


def export(
    model: o.Model,
    out: Annotated[
        Path | None,
        o.output("--out", "-o", help="Output file; onnx: or a directory for servers.", show_default=False),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="onnx, torch, openvino, gguf, ctranslate2; or list: show which support MODEL.",
            rich_help_panel=o.FORMAT,
        ),
    ] = "onnx",
    fp16: Annotated[bool, typer.Option("--fp16", help="Half precision.", rich_help_panel=o.FORMAT)] = False,
    int8: Annotated[bool, typer.Option("--int8", help="8-bit integers; gguf: q8_0.", rich_help_panel=o.FORMAT)] = False,
    quantise: Annotated[
        str | None,
        typer.Option(
            help="Activation ranges of --int8: dynamic (per batch), static (calibrated on --data).",
            rich_help_panel=o.FORMAT,
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="gguf: f16, q8_0 or q4_0.", rich_help_panel=o.FORMAT)] = None,
    data: o.Data = None,
    task: o.Task = None,
    eval_: Annotated[
        str | None, o.inputs("--eval", help="Labelled rows for scoring the dense model, MODEL and the file.")
    ] = None,
    dense: Annotated[
        str | None, o.inputs(help="A model to compare size and latency with; default: the one it was pruned from.")
    ] = None,
    trust_remote_code: o.TrustRemoteCode = False,
    force: o.Force = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Write MODEL, dense or pruned, for another engine, checked against PyTorch."""
    from shearling.checkpoint.pretrained import load_model
    from shearling.cli.console import emit, tell
    from shearling.exporters.table import describe_list, suitable
    from shearling.workflows.export import export as write

    if format_ == "list":
        found = suitable(load_model(model, device="cpu", trust_remote_code=trust_remote_code))
        if as_json:
            emit({"model": model, "formats": found})
        else:
            tell(describe_list(found), quiet=quiet)
        return
    if out is None:
        raise typer.BadParameter("say where to write to", param_hint="--out")
    result = write(
        model, out, format=format_, fp16=fp16, int8=int8, quantise=quantise, dtype=dtype, data=data, task=task,
        eval=eval_, dense=dense, trust_remote_code=trust_remote_code, force=force, progress=not quiet,
    )  # fmt: skip
    if as_json:
        emit(result.to_json())
    else:
        tell(str(result), quiet=quiet)
