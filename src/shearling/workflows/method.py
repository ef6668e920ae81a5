"""Create a method from command-line options: its name, flags, and `name=value` settings."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from shearling.errors import InputError
from shearling.methods import METHODS, Method, configured


def method_from(name: str, flags: Mapping[str, Any], assigned: Sequence[str] = ()) -> Method:
    """Create a method by name.

    flags     options of some methods; those of other methods must have their default values
    assigned  settings such as `damp=0.02` or `refit=false`
    """
    given = dict(map(_assignment, assigned))
    if name in METHODS:
        known = [field.name for field in fields(METHODS[name])]
        for setting in given:
            if setting not in known:
                have = f"it has {', '.join(known)}" if known else "it has none"
                raise InputError(f"Method {name} has no setting '{setting}' (--set); {have}.")
    return configured(name, **{**flags, **given})


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise InputError(f"--set {text} makes no sense; write name=value, such as --set damp=0.02.")
    return name.strip(), _value(value.strip())


def _value(text: str) -> Any:
    """Parse a number, true, false or none; other text is kept."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
