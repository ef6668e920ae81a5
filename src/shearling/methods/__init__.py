"""The pruning methods: gather evidence, choose the units to keep, repair the rest.

Each is a dataclass of settings; the mathematics is in the stages it calls (`shearling.surgeon`, `shearling.paper`).
`METHODS` lists them by name and `register` adds one; nothing outside this package changes.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from shearling.costs import asked
from shearling.errors import InputError
from shearling.methods.method import Evidence, Method, Repaired
from shearling.methods.paper import Paper
from shearling.methods.surgeon import Surgeon
from shearling.surgeon.allocate import allocate as allocate_counts

__all__ = [
    "METHODS",
    "Evidence",
    "Method",
    "Paper",
    "Repaired",
    "Surgeon",
    "allocate_counts",
    "asked",
    "configured",
    "method_of",
    "register",
    "settings_of",
]

METHODS: dict[str, type[Any]] = {"surgeon": Surgeon, "paper": Paper}


def register(method: type[Any]) -> type[Any]:
    """Register a method under its name, for `method="..."` and `--method`; usable as a decorator."""
    METHODS[method.name] = method
    return method


def method_of(method: str | Method) -> Method:
    """Look a method up by name; instances are returned unchanged."""
    return configured(method) if isinstance(method, str) else method


def configured(name: str, **settings: Any) -> Method:
    """Create a method by name. Settings it lacks are ignored if they have their default value, else an error."""
    if name not in METHODS:
        raise InputError(f"No method '{name}'; there are {', '.join(sorted(METHODS))}.")
    chosen = METHODS[name]
    known = {field.name for field in fields(chosen)}
    for option, value in settings.items():
        owners = [n for n, m in METHODS.items() if any(f.name == option and f.default != value for f in fields(m))]
        if option not in known and owners:
            raise InputError(f"'{option}' is an option of method {owners[0]}, not of {name}.")
    method: Method = chosen(**{option: value for option, value in settings.items() if option in known})
    return method


def settings_of(method: Method) -> dict[str, Any]:
    """The settings of a method as plain data, for the record."""
    return asdict(method)  # type: ignore[call-overload,no-any-return]
