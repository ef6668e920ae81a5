"""A method from words: its name, the flags of the command line, and `name=value` settings of any method."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from shearling.errors import InputError
from shearling.methods import METHODS, Method, configured


def method_from(name: str, flags: Mapping[str, Any], assigned: Sequence[str] = ()) -> Method:
    """A method by its name.

    flags     options that belong to some methods; those of other methods must be at their defaults
    assigned  settings such as `damp=0.02` or `refit=false`, whatever the method calls them
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
    """A number, true or false, none, or else the words themselves."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
