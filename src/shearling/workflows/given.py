"""What callers give as a model and as data, and whether that has to be read first. Plain batches need nothing more."""

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
INPUTS = {"input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features"}  # what models run on


T = TypeVar("T")


def renamed(old: str, new: str, given: T | None, value: T) -> T:
    """The value of a parameter that had another name; the old name works, with a warning."""
    if given is None:
        return value
    warnings.warn(f"{old}= is now called {new}=.", DeprecationWarning, stacklevel=3)
    return given


def needs_reading(data: Any) -> bool:
    """Whether the data is still text (or files, or rows of them), not yet what a model runs on."""
    if isinstance(data, (str, os.PathLike)) or type(data).__name__ == "Rows":
        return True
    if hasattr(data, "column_names"):
        return not INPUTS & set(data.column_names)
    if not isinstance(data, Sequence) or not len(data):
        return False
    first = data[0]
    if not isinstance(first, Mapping):
        return is_text(first)
    return not INPUTS & first.keys() and not any(hasattr(value, "shape") for value in first.values())


def is_text(example: Any) -> bool:
    """A text, or a pair of texts."""
    if isinstance(example, str):
        return True
    return isinstance(example, (list, tuple)) and len(example) == 2 and all(isinstance(e, str) for e in example)


def model_in(given: Any) -> Any:
    """The model that is in what `shearling.prune` gave, or in what torch.compile made of it; else what was given."""
    if isinstance(given, Pruned):
        return given.model
    return getattr(given, "_orig_mod", given)


def is_transformer(model: Any) -> bool:
    """Whether this is a model of transformers itself, not its name or something that holds one."""
    return hasattr(model, "config") and hasattr(model, "base_model")
