"""Checks and ranges of the options of a run and its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shearling.errors import InputError

Samples = int | Literal["auto"]
Shape = Literal["uneven", "stock"]
MOST_TOKENS = 2**20  # per example, where the model has no limit of its own
MOST_SAMPLES = 2048  # maximum of samples="auto"
SEEDS = 2**63  # bound of torch's seeds
MOST_TEXTS = 8192  # the same for embedding models on a GPU, where more texts cost seconds and improve recall
DAMPING = (0.0, 1e6)  # share of the mean diagonal; 0 means none, as far as the matrices allow it


def check_options(method: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise for the first option of a method that has the wrong type or is out of range."""
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


def checked_multiple(multiple_of: int | None) -> int | None:
    """Check a step of filter counts; None is allowed."""
    if not _counts(multiple_of):
        raise InputError(f"multiple_of={multiple_of!r} makes no sense; 8 suits most GPUs, 1 means no rounding.")
    return multiple_of


def check_batch(batch_size: int | None, seq_len: int | None) -> None:
    """Complain about the shape of a batch to time, unless both are whole numbers or None."""
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not _counts(value):
            raise InputError(f"{name}={value!r} makes no sense; give at least 1.")


def _counts(value: object) -> bool:
    """Whether this is a whole number from 1, or None."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def checked_samples(samples: object, most: int = MOST_SAMPLES) -> int:
    """Maximum number of examples to draw; `most` replaces "auto"."""
    if samples == "auto":
        return most
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise InputError(f'samples={samples!r} makes no sense; give a number of examples, or "auto".')
    return samples


def checked_seed(seed: object) -> int:
    """Check a seed: torch and NumPy take the same ones from 0 on."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise InputError(f"seed={seed!r} makes no sense; give a whole number from 0 to 2^63 - 1.")
    return seed


def checked_shape(shape: object) -> Shape:
    """Check the name of a shape."""
    for known in get_args(Shape):
        if shape == known:
            return known  # type: ignore[no-any-return]
    raise InputError(f"shape={shape!r} is not known; there are {' and '.join(get_args(Shape))}.")
