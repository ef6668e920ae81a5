"""The options of a method: each has a stated range, and all are checked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shearling.errors import InputError

DAMPING = (0.0, 1e6)  # a share of the mean diagonal; 0 means none, as far as the matrices allow it


def check_options(method: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Complain about the first option of a method that is not a value of its kind, or is outside its range."""
    hints = get_type_hints(type(method))
    for field in fields(method):
        name, value = field.name, getattr(method, field.name)
        if get_origin(hints[name]) is Literal:
            allowed = get_args(hints[name])
            if value not in allowed:
                raise InputError(f"{name}={value!r} is not known; there are {', '.join(map(str, allowed))}.")
        elif hints[name] is bool:
            if type(value) is not bool:
                raise InputError(f"{name}={value!r} is neither True nor False.")
        elif name in ranges:
            low, high = ranges[name]
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise InputError(f"{name}={value!r} is out of range; give a number from {low:g} to {high:g}.")
