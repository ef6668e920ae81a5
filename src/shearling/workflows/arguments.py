"""The model and data arguments of the public functions: types, and whether they have to be read first."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from shearling.checkpoint.pruned import Pruned

# A file name, texts, pairs of texts, rows, a raw or tokenised `datasets.Dataset`, a DataLoader, batches.
Data = (
    str
    | os.PathLike[str]
    | Iterable[str]
    | Iterable[tuple[str, str]]
    | Iterable[Mapping[str, Any]]
    | Mapping[str, Any]  # one batch
)
INPUTS = {"input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features"}  # main model inputs


T = TypeVar("T")


def renamed(old: str, new: str, given: T | None, value: T) -> T:
    """The value of a renamed parameter; the old name works with a warning."""
    if given is None:
        return value
    warnings.warn(f"{old}= is now called {new}=.", DeprecationWarning, stacklevel=3)
    return given


def needs_reading(data: Any) -> bool:
    """Whether the data is text, files or raw rows instead of model inputs."""
    if isinstance(data, (str, os.PathLike)) or type(data).__name__ == "Rows":
        return True
    if hasattr(data, "column_names"):
        return not INPUTS & set(data.column_names or ())  # a stream may not know them
    if not isinstance(data, Sequence) or not len(data):
        return False
    first = data[0]
    if not isinstance(first, Mapping):
        return is_text(first)
    return not INPUTS & first.keys() and not any(hasattr(value, "shape") for value in first.values())


def is_text(example: Any) -> bool:
    """Whether this is a text or a pair of texts."""
    if isinstance(example, str):
        return True
    return isinstance(example, (list, tuple)) and len(example) == 2 and all(isinstance(e, str) for e in example)


def model_in(given: Any) -> Any:
    """Unwrap the result of `shearling.prune` or of torch.compile; other values are returned unchanged."""
    if isinstance(given, Pruned):
        return given.model
    return getattr(given, "_orig_mod", given)


def is_transformer(model: Any) -> bool:
    """Whether this is a transformers model."""
    return hasattr(model, "config") and hasattr(model, "base_model")
