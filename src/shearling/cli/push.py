"""`shearling push`."""

from __future__ import annotations

from typing import Annotated

import typer

from shearling.cli import options as o


def push(
    directory: o.Directory,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="The repository on the Hub: you/my-model-50.", show_default=False)
    ],
    private: Annotated[bool, typer.Option("--private", help="For your eyes only.")] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Publish DIRECTORY on the Hugging Face Hub."""
    from shearling.cli.console import emit, say
    from shearling.push import push as publish

    result = publish(directory, repo_id, private=private)
    if as_json:
        emit(result.to_json())
    else:
        say(f"{result.files} files, {result.bytes / 1e6:.1f} MB: {result.url}", quiet=quiet)
