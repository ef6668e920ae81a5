"""The command line. It reads options, calls the library, prints; nothing is decided here."""

from __future__ import annotations

import os
import sys

from shearling.errors import InputError, ShearlingError


def main() -> None:
    """Run the command line: 0 done, 2 wrong use or bad input, 130 interrupted, 1 anything else."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """One command, as an exit code."""
    import click

    from shearling.cli.app import app
    from shearling.cli.console import complain

    try:
        result = app(arguments, prog_name="shearling", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except InputError as error:
        complain(str(error))
        return 2
    except click.exceptions.Abort:
        complain("interrupted")
        return 130
    except KeyboardInterrupt:
        complain("interrupted; nothing was left half-written")
        return 130
    except click.ClickException as error:
        error.show(file=sys.stderr)
        return 2
    except ShearlingError as error:
        complain(str(error))
        return 1
    except Exception as error:
        if os.environ.get("SHEARLING_DEBUG"):
            raise
        complain(f"{type(error).__name__}: {error} (SHEARLING_DEBUG=1 shows where)")
        return 1
