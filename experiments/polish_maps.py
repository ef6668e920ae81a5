"""Attention maps of teacher and student, for `polish.py`: what some distillations match beside hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

TINY = 1e-6  # added to probabilities before their logarithm


class Maps:
    """The attention maps of a model's last forward pass, [B, heads, S, S] each, in execution order."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.caught: list[Tensor] = []

    @contextmanager
    def watched(self) -> Iterator[Maps]:
        """Use the attention that returns its probabilities, and catch them; undone afterwards."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        with ExitStack() as hooks:
            hooks.callback(self.model.register_forward_pre_hook(lambda *_: self.caught.clear()).remove)
            for module in self.model.modules():
                hooks.callback(module.register_forward_hook(self._catch).remove)
            try:
                yield self
            finally:
                self.model.set_attn_implementation(before)

    def _catch(self, module: Any, args: Any, output: Any) -> None:
        found = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if isinstance(found, Tensor) and found.dim() == 4 and not any(found is known for known in self.caught):
            self.caught.append(found)  # modules further out return the same tensor again


def map_distance(student: Sequence[Tensor], teacher: Sequence[Tensor], kept: Sequence[Tensor], real: Tensor) -> Tensor:
    """Mean KL divergence from the teacher's maps of the kept heads, over the layers that have heads, and real tokens.

    kept  [heads] of every layer
    real  [B, S]
    """
    pairs = [(maps, heads) for maps, heads in zip(teacher, kept, strict=True) if len(heads)]
    each = []
    for found, (maps, heads) in zip(student, pairs, strict=True):
        wanted = maps.detach().index_select(1, heads.to(maps.device)).float()
        apart = wanted * ((wanted + TINY).log() - (found.float() + TINY).log())
        by_query = apart.sum(-1).mean(1)  # [B, S]
        each.append((by_query * real).sum() / real.sum())
    return torch.stack(each).mean()
