"""Whole layers go: ShortGPT (Men et al., 2024) and ReplaceMe (Shopkhoev et al., 2025).

ShortGPT drops the layers whose output is most like their input, by the cosine of the two.

ReplaceMe drops the run of n layers after some layer i over which the hidden state turns least, and makes up for it with
a linear map of what the FFN of layer i puts out, M:  min || M T + Y - Z ||^2, where Y is the residual that M is added
to and Z the hidden state behind the run. T is multiplied into the FFN's output projection, so it costs nothing; where a
norm follows that projection it cannot be, and stands behind the norm as D x D more parameters, which are counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rivals.subject import Subject
from shearling.engine.hooks import frozen, split_call
from shearling.models.structure import structure_of
from shearling.models.sublayer import Sublayer

RIDGE = 1e-4  # of the mean diagonal, so that the solution exists


class Skipped(nn.Module):
    """In place of a layer: hands the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name in ("attention_type", "layer_idx"):  # what a model may ask its layers
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return split_call(args, kwargs)[0]


def shortgpt(subject: Subject, share: float) -> Any:
    """Without the layers that change the direction of the hidden state least."""
    cosines = subject.once("cosines", lambda: _cosines(subject))
    depth = len(cosines) - 1
    alike = cosines.diagonal(1)  # [depth]: each layer's input with its output
    drop = depth - int(share * depth + 1e-9)
    return _skip(copy.deepcopy(subject.model), subject, alike.topk(drop).indices.tolist())


def replaceme(subject: Subject, share: float) -> Any:
    """Without a run of layers, whose work a linear map takes over."""
    cosines = subject.once("cosines", lambda: _cosines(subject))
    depth = len(cosines) - 1
    stack = subject.structure.stacks[0]
    outside = bool(stack.sublayers[0][-1].part.norm)
    limit = subject.limit(share)
    per_layer = limit.dense / depth
    extra = float(subject.model.config.get_text_config().hidden_size ** 2) if outside else 0.0
    drop = depth - int((limit.budget - extra) / per_layer + 1e-9)
    # Layers i + 1 to i + drop go: from hidden state i + 1 to hidden state i + 1 + drop.
    start = max(range(depth - drop), key=lambda i: float(cosines[i + 1, i + 1 + drop]))
    student = copy.deepcopy(subject.model)
    _insert(structure_of(student).stacks[0].sublayers[start][-1], _linear_map(subject, start, start + drop))
    return _skip(student, subject, range(start + 1, start + 1 + drop))


def _cosines(subject: Subject) -> Tensor:
    """[L + 1, L + 1]: the mean cosine between the hidden states before, between and behind the layers."""
    stack = subject.structure.stacks[0]
    states: list[Tensor] = []
    total: Any = 0.0

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not states:
            states.append(F.normalize(split_call(args, kwargs)[0].float(), dim=-1).flatten())
        states.append(F.normalize(_tensor(output).float(), dim=-1).flatten())

    handles = [layer.register_forward_hook(see, with_kwargs=True) for layer in stack.layers]
    try:
        with frozen(subject.model), torch.no_grad():
            for ids in subject.batches():
                states.clear()
                subject.run(ids)
                every = torch.stack(states)
                total = total + every @ every.T
    finally:
        for handle in handles:
            handle.remove()
    cosines: Tensor = (total / subject.calibration.numel()).cpu()
    return cosines


def _skip(student: Any, subject: Subject, gone: Iterable[int]) -> Any:
    """The student without some layers, changed in place."""
    pile = student.base_model.get_submodule(subject.structure.stacks[0].row.layers)
    for number in gone:
        pile[number] = Skipped(pile[number])
    return student


def _linear_map(subject: Subject, first: int, last: int) -> Tensor:
    """[D, D]: T, so that M T + Y is nearest to the hidden state behind layer `last`, M and Y of layer `first`."""
    stack = subject.structure.stacks[0]
    ffn = stack.sublayers[first][-1]
    seen: dict[str, Tensor] = {}
    gram: Any = 0.0
    cross: Any = 0.0

    def on_residual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["residual"] = split_call(args, kwargs)[0].flatten(0, -2).double()

    def on_layer(name: str) -> Any:
        return lambda module, args, output: seen.update({name: _tensor(output).flatten(0, -2).double()})

    handles = [
        ffn.residual.register_forward_pre_hook(on_residual, with_kwargs=True),
        stack.layers[first].register_forward_hook(on_layer("output")),
        stack.layers[last].register_forward_hook(on_layer("target")),
    ]
    try:
        with frozen(subject.model), torch.no_grad():
            for ids in subject.batches():
                subject.run(ids)
                added = seen["output"] - seen["residual"]
                gram = gram + added.T @ added
                cross = cross + added.T @ (seen["target"] - seen["residual"])
    finally:
        for handle in handles:
            handle.remove()
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, cross)


def _insert(ffn: Sublayer, T: Tensor) -> None:
    """The map behind an FFN: in its output projection, or behind the norm that follows it."""
    with torch.no_grad():
        if not ffn.part.norm:
            ffn.weight.copy_((T.T @ ffn.weight.double()).to(ffn.weight))
            return
        linear = nn.Linear(len(T), len(T), bias=False).to(ffn.weight)
        linear.weight.copy_(T.T)
        owner, _, name = ffn.part.norm.rpartition(".")
        norm = ffn.layer.get_submodule(ffn.part.norm)
        setattr(ffn.layer.get_submodule(owner), name, nn.Sequential(norm, linear))


def _tensor(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
