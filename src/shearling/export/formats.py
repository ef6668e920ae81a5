"""What every format is asked: does it suit the model, write it, run it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shearling.errors import InputError
from shearling.export.check import Runner
from shearling.export.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Job:
    """A model to write.

    inputs       a batch to trace the model with
    outputs      the names of what the model gives
    path         the file, or the directory of formats that are one
    calibration  batches that static quantisation takes the ranges of activations from
    source       where the model came from: a directory, a file, or a Hub id
    """

    model: PreTrainedModel
    inputs: Inputs
    outputs: list[str]
    path: Path
    precision: str = "float32"
    calibration: Sequence[Inputs] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    source: str = ""

    def typed_model(self) -> PreTrainedModel:
        """The model in the precision it is traced in; half precision changes it in place."""
        return self.model.half() if self.precision == "float16" else self.model


class Format(Protocol):
    """A module of this package that writes one format."""

    @property
    def NEEDED(self) -> tuple[str, ...]:  # noqa: N802 - constants of a module
        """Packages to import."""

    @property
    def EXTRA(self) -> str:  # noqa: N802
        """The extra of shearling that brings them; empty where torch is enough."""

    @property
    def SUFFIX(self) -> str:  # noqa: N802
        """Of the file; empty for a directory."""

    @property
    def PRECISIONS(self) -> tuple[str, ...]:  # noqa: N802
        """What it can be written in; the first is the default."""

    def unsuited(self, model: PreTrainedModel) -> str | None:
        """Why the model cannot be written; None where it can."""

    def part(self, model: PreTrainedModel) -> PreTrainedModel:
        """The part of the model that is written: all of it, or the encoder without its head."""

    def write(self, job: Job) -> None:
        """Write the model to the job's path."""

    def open_runner(self, path: Any) -> Runner:
        """Open what was written, to be run."""

    def runtime(self) -> str:
        """What runs it, with its version."""


def missing(kind: Format) -> list[str]:
    """The packages that are not installed."""
    return [name for name in kind.NEEDED if importlib.util.find_spec(name) is None]


def require(name: str, kind: Format) -> None:
    """Complain before the work where a package is missing."""
    if absent := missing(kind):
        raise InputError(f"Export to {name} needs {', '.join(absent)}: pip install 'shearling[{kind.EXTRA}]'.")
