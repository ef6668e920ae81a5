"""The input of a format's writer."""

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

    inputs       example batch for tracing
    outputs      names of the output tensors
    path         the file, or the directory for formats that write one
    calibration  batches for the activation ranges of static quantisation
    source       origin of the model: a directory, a file, or a Hub id
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
        """The model in the precision of tracing; half precision converts it in place."""
        return self.model.half() if self.precision == "float16" else self.model
