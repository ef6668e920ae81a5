"""Validation rules for JSON read from disk.

A rule maps a value to None, or to what is wrong and where: `flops.dense: 'much' is not a number`. Rules compose; a
`Schema` is the rule of one kind of file, with the error class to raise and the remedy to name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shearling.errors import InputError

Rule = Callable[[Any], "str | None"]

MAX_BYTES = 256 * 2**20  # of a file; the record of a large model has a few megabytes
MAX_SIZE = 2**24  # rows or columns of a projection
MAX_NUMBER = 1e30  # bound of costs, seconds and scores; excludes NaN and infinity


@dataclass(frozen=True)
class Schema:
    """One kind of file: its name, its rule, the error to raise when the rule fails, and the remedy."""

    what: str
    rule: Rule
    error: type[InputError]
    remedy: str

    def read(self, path: Path, *, most: int = MAX_BYTES) -> Any:
        """Read and check a file of this kind."""
        try:
            if path.stat().st_size > most:
                raise ValueError(f"it is larger than {most >> 20} MiB")
            value = json.loads(path.read_text(encoding="utf-8"))
            json.dumps(value, ensure_ascii=False).encode()  # lone surrogates cannot be encoded
        except OSError as error:
            raise self.error(f"Cannot read the {self.what} {path}: {error.strerror or error}. {self.remedy}") from None
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
            raise self._wrong(path, str(error)) from None
        return self.check(value, path)

    def check(self, value: Any, path: Path) -> Any:
        """Return the value if the rule holds, raise otherwise."""
        found = self.rule(value)
        if found is not None:
            raise self._wrong(path, found.lstrip(".: "))
        return value

    def _wrong(self, path: Path, found: str) -> InputError:
        return self.error(f"{path} is not a {self.what} that can be used: {found}. {self.remedy}")


def leaf(holds: Callable[[Any], bool], wanted: str) -> Rule:
    """A value for which `holds` is true."""
    return lambda value: None if holds(value) else f": {shown(value)} is not {wanted}"


def number(wanted: str = "a number", low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> Rule:
    """A number in an open range; NaN and infinity are rejected."""
    return leaf(lambda value: type(value) in (int, float) and low < value < high, wanted)


def integer(wanted: str = "a whole number", low: int = 0, high: int = MAX_SIZE) -> Rule:
    """A whole number in a closed range."""
    return leaf(lambda value: type(value) is int and low <= value <= high, wanted)


def one_of(names: Iterable[str]) -> Rule:
    """One of these words."""
    known = tuple(names)
    return leaf(lambda value: isinstance(value, str) and value in known, " or ".join(map(repr, known)))


def or_none(rule: Rule) -> Rule:
    """As the rule says, or null."""
    return lambda value: None if value is None else rule(value)


def several(rule: Rule, *, least: int = 0, most: int | None = None) -> Rule:
    """A list whose every element keeps the rule."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
            return f": {shown(value)} is not a list of {'the right length' if least else 'values'}"
        return next((f"[{i}]{found}" for i, one in enumerate(value) if (found := rule(one)) is not None), None)

    return check


def mapping(rule: Rule, keys: Rule | None = None) -> Rule:
    """An object whose every value keeps the rule, and every key its own."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f": {shown(value)} is not an object"
        for key, one in value.items():
            found = rule(one) if keys is None else keys(key) or rule(one)
            if found is not None:
                return f".{key}{found}"
        return None

    return check


def record(
    fields: Mapping[str, Rule],
    *,
    closed: bool = False,
    also: Callable[[dict[str, Any]], str | None] | None = None,
) -> Rule:
    """An object with these fields; `name?` may be missing. `closed` allows no others, `also` looks at the whole."""
    rules = {name.rstrip("?"): rule for name, rule in fields.items()}
    wanted = {name for name in fields if not name.endswith("?")}

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f": {shown(value)} is not an object"
        missing = sorted(wanted - value.keys())
        unknown = sorted(value.keys() - rules.keys()) if closed else []
        if missing or unknown:
            return f": {'no' if missing else 'unknown'} field {', '.join(map(repr, missing or unknown))}"
        checked = ((name, rule(value[name])) for name, rule in rules.items() if name in value)
        wrong = next((f".{name}{found}" for name, found in checked if found is not None), None)
        return wrong or (None if also is None else also(value))

    return check


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several space-separated fields."""
    return dict.fromkeys(names.split(), rule)


def shown(value: Any) -> str:
    """The repr of a value, truncated for a message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # an integer of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) < 60 else text[:57] + "..."


TEXT = leaf(lambda value: isinstance(value, str), "a text")
NAME = leaf(lambda value: isinstance(value, str) and bool(value), "a name")
NUMBER = number()
COUNT = integer("a count", 0, MAX_SIZE)
ANYTHING: Rule = lambda value: None  # noqa: E731
OBJECT = mapping(ANYTHING)
