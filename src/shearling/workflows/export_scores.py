"""Scoring what an export wrote beside the models it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shearling.evaluation.exam import Exam
from shearling.exporters.check import Runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scores:
    """One exam, taken by the dense model, the model and the file."""

    def __init__(self, exam: Exam) -> None:
        self.exam = exam
        self.found: dict[str, Any] = {}

    def take(self, step: str, model: Any) -> None:
        """Score one of them."""
        result = self.exam.take(model, device="cpu")
        self.found |= {"task": result.task, "metric": result.metric, "examples": result.examples}
        self.found[step] = round(result.value, 4)

    def to_json(self) -> dict[str, Any]:
        """Task, metric, examples and the value at each step; the model is also called `pruned` beside a dense one."""
        return self.found | ({"pruned": self.found["model"]} if "dense" in self.found else {})


class FileModel(nn.Module):
    """A file in the place of the model, to be scored like it."""

    def __init__(self, model: PreTrainedModel, run: Runner) -> None:
        super().__init__()
        self.config, self.run = model.config, run
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)  # tells the device

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the file gives."""
        return {name: torch.from_numpy(values) for name, values in self.run(inputs).items()}
