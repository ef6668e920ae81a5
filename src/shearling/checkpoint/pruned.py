"""What pruning gives: the smaller model, and everything that is known about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shearling.checkpoint.record import write_page
from shearling.checkpoint.save import save
from shearling.report.record import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class Pruned:
    """The result: a smaller model, what stayed in it, and the record of how it came about.

    flipped  examples that dense and pruned answer differently, where both were scored. They show texts of the
             evaluation set, so they are on report pages and never in a checkpoint.
    """

    model: PreTrainedModel
    kept: list[Tensor]
    report: Report
    flipped: Mapping[str, Any] | None = None

    def save(self, directory: str | os.PathLike[str], *, source: Any = None, force: bool = False) -> Path:
        """Write a checkpoint that loads with plain `from_pretrained`; `source` is where tokenizer files come from."""
        return save(self.model, self.kept, self.report.to_json(), directory, source=source, force=force)

    def write_report(self, path: str | os.PathLike[str], *, directory: str = "DIR", force: bool = False) -> Path:
        """Write the report as one HTML page; `directory` is where the model is saved, for the lines that load it."""
        write_page(self.report.to_json() | {"flipped": self.flipped}, directory, Path(path), force=force)
        return Path(path)

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        return repr(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()
