"""What a format is given to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shearling.exporters.inputs import Inputs

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
