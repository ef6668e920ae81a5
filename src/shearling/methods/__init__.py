"""The two methods as the pipeline sees them: gather evidence, choose what stays, repair what is left.

Each is a small dataclass that says *what*; the mathematics lives in the stages it calls (`shearling.surgeon`,
`shearling.paper`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from shearling.errors import InputError
from shearling.methods.counts import allocate_counts, asked
from shearling.methods.method import Evidence, Method, Repaired
from shearling.methods.paper import Paper
from shearling.methods.surgeon import Surgeon
from shearling.paper.importance import Importance

__all__ = [
    "Evidence",
    "Method",
    "Paper",
    "Repaired",
    "Surgeon",
    "allocate_counts",
    "asked",
    "configured",
    "method_of",
]


def method_of(method: str | Method) -> Method:
    """A method by name, or as it is."""
    if not isinstance(method, str):
        return method
    known: dict[str, type[Surgeon] | type[Paper]] = {"surgeon": Surgeon, "paper": Paper}
    if method not in known:
        raise InputError(f"No method '{method}'; there are {', '.join(sorted(known))}.")
    return known[method]()


def configured(method: str, **settings: Any) -> Method:
    """A method by name with those of the settings that it has; the others must not have been changed for it."""
    chosen = type(method_of(method))
    known = {f.name: f for f in fields(chosen)}  # type: ignore[arg-type]
    for name, allowed in (("importance", get_args(Importance)), ("allocation", ("searched", "uniform"))):
        if name in settings and settings[name] not in allowed:
            raise InputError(f"{name}={settings[name]!r} is not known; there are {', '.join(allowed)}.")
    other = Paper if chosen is Surgeon else Surgeon
    for field in fields(other):
        if field.name not in known and settings.get(field.name, field.default) != field.default:
            raise InputError(f"'{field.name}' is an option of method {other.name}, not of {chosen.name}.")
    return chosen(**{name: value for name, value in settings.items() if name in known})
