"""`shearling architectures`."""

from __future__ import annotations

from shearling.cli import options as o


def architectures(as_json: o.Json = False) -> None:
    """List the architectures that can be pruned, and what is pruned in each."""
    from shearling.cli.console import emit, tell
    from shearling.models.table import architectures as known
    from shearling.models.table import describe

    if as_json:
        emit({"architectures": known()})
    else:
        tell(describe())
