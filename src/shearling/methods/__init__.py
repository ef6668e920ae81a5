"""The methods as the pipeline sees them: gather evidence, choose what stays, repair what is left.

Each is a small dataclass that says *what*; the mathematics lives in the stages it calls (`shearling.surgeon`,
`shearling.paper`). `METHODS` lists them by name; `register` adds one, and nothing outside this package changes.
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
    """Make a method known by its name, for `method="..."` and `--method`; usable as a decorator."""
    METHODS[method.name] = method
    return method


def method_of(method: str | Method) -> Method:
    """A method by name, or as it is."""
    return configured(method) if isinstance(method, str) else method


def configured(name: str, **settings: Any) -> Method:
    """A method by name with those of the settings that it has; the others must not have been changed for it."""
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
    """The settings of a method as plain data, for records."""
    return asdict(method)  # type: ignore[call-overload,no-any-return]
