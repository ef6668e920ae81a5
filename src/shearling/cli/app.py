"""The commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shearling._version import __version__
from shearling.cli.architectures import architectures
from shearling.cli.compare import compare
from shearling.cli.demo import demo
from shearling.cli.evaluate import evaluate
from shearling.cli.export import export
from shearling.cli.profile import profile
from shearling.cli.prune import prune
from shearling.cli.retrain import retrain
from shearling.cli.show import show
from shearling.cli.sweep import sweep

app = typer.Typer(
    help="Prune a fine-tuned Transformer in seconds, without retraining.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (prune, profile, evaluate, sweep, retrain, show, compare, export, architectures, demo):
    # EPILOG of a command's module has the examples at the end of its help.
    app.command(epilog=getattr(sys.modules[command.__module__], "EPILOG", None))(command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"shearling {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Prune a fine-tuned Transformer in seconds, without retraining."""
