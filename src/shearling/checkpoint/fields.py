"""What `shearling.json` may hold: those who read a record rely on it, and files get changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shearling.costs import KINDS

MAX_SIZE = 2**24  # rows or columns of a projection
MAX_NUMBER = 1e30  # costs, seconds, scores; neither NaN nor infinity is below


def wrong_field(record: dict[str, Any]) -> str | None:
    """The first field that is not what shearling writes there."""
    for name, fits in WANTED.items():
        if not fits(record.get(name)):
            return name
    for name, fits in OPTIONAL.items():
        if name in record and not fits(record[name]):
            return name
    return None


def is_count(value: Any) -> bool:
    """A size that a model may have."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_NUMBER


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _object_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _with(fields: dict[str, Callable[[Any], bool]], **more: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """An object with these fields, and perhaps with `more`."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and fits(value[name]) for name, fits in fields.items())
        and all(fits(value[name]) for name, fits in more.items() if name in value)
    )


_COST = _with(dict.fromkeys(("dense", "pruned", "ratio"), _number))
_LAYERS = _list_of(_object_of(is_count))
WANTED: dict[str, Callable[[Any], bool]] = {
    "method": _text,
    "model_type": _text,
    "constraint": lambda value: _object_of(_number)(value) and value.keys() <= {*KINDS},
    "sample": _with({"examples": is_count, "mean_length": _number, "fingerprint": _text}),
    **dict.fromkeys(("flops", "params", "flops_model", "params_model"), _COST),
    **dict.fromkeys(("layers", "dense_layers"), _LAYERS),
    "seconds": _object_of(_number),
    "warnings": _list_of(_text),
    "repairs": _list_of(_with({"sublayer": _text, "note": _text})),
}
_LATENCY = _with(
    {"predicted": _number, "device": _text},
    measured=_or_none(lambda value: _number(value) and value > 0),
    batch_size=is_count,
    seq_len=is_count,
    dtype=_text,
    corrections=is_count,
)
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "format": is_count,
    "settings": lambda value: isinstance(value, dict),
    "check": _or_none(_number),
    "base": _or_none(_text),
    "architecture": _text,
    "auto_class": _text,
    "retrained": _with({}, **dict.fromkeys(("before", "after"), _or_none(_with({"metric": _text, "value": _number})))),
    "seed": lambda value: type(value) is int,
    "versions": _object_of(_text),
    "card": lambda value: isinstance(value, dict),
    "evaluations": _list_of(
        _with(
            {"task": _text, "metric": _text, "value": _number, "examples": is_count},
            em=_number,
            dense=_or_none(_number),
        )
    ),
    "exports": _list_of(
        _with(
            {"out": _text, "format": _text, "precision": _text, "runtime": _text, "bytes": is_count},
            agreement=_or_none(_number),
        )
    ),
    "latency": _LATENCY,
}
