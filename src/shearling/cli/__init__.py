"""The command line: reads options, calls the library, prints."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

from shearling.errors import InputError, ShearlingError

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main() -> None:
    """Run the command line: 0 done, 2 wrong use or bad input, 130 interrupted, 1 anything else."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        _end(run(sys.argv[1:]))
    except KeyboardInterrupt:  # outside of a command
        sys.exit(INTERRUPTED)


def _end(code: int) -> None:
    """Exit; with several processes immediately: a gloo thread that is left would abort Python's shutdown."""
    from shearling.cli.processes import place

    if place()[1] > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _leave(number: int, frame: object) -> None:
    """Turn SIGTERM into SystemExit, so that temporary folders are removed."""
    raise SystemExit(128 + number)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code."""
    import typer

    from shearling.cli.console import complain
    from shearling.cli.processes import idle, together

    if idle(arguments):
        return 0
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would interfere with ours
    for name in (
        "torchao",
        "torch.utils._pytree",
        "bitsandbytes",
    ):  # imported by transformers; their kernels are unused
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from shearling.cli.app import app

        with together(arguments):
            result = app(arguments, prog_name="shearling", standalone_mode=False)
        if result == INTERRUPTED:  # typer's code for Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except InputError as error:
        complain(str(error))
        return 2
    except typer.Exit as leaving:
        return leaving.exit_code
    except typer.Abort:
        complain("interrupted")
        return INTERRUPTED
    except KeyboardInterrupt:
        complain("interrupted; nothing was left half-written")
        return INTERRUPTED
    except _usage_error() as error:
        if message := error.format_message().strip():  # empty if the help was shown
            path = getattr(getattr(error, "ctx", None), "command_path", "shearling")
            complain(f"{message} ({path} --help lists what there is)")
        return 2
    except ShearlingError as error:
        complain(str(error))
        return 1
    except Exception as error:
        if os.environ.get("SHEARLING_DEBUG"):
            raise
        complain(f"{type(error).__name__}: {error} (SHEARLING_DEBUG=1 shows where)")
        return 1


def _usage_error() -> Any:
    """Click's UsageError; newer versions of typer bundle click, so it is found by inheritance."""
    import typer

    return typer.BadParameter.__mro__[2]
