"""Moments of the queries and keys of every head, measured over the sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from finer_parts import ScoreMoments
from torch import Tensor

from shearling.engine.hooks import device_of, differentiable, frozen, run
from shearling.engine.losses import example_losses
from shearling.engine.precision import kernels
from shearling.models.structure import Stack, Structure
from shearling.sample.batch import Batch


def score_moments(structure: Structure, batches: Sequence[Batch], seed: int, precision: Any) -> list[ScoreMoments]:
    """One forward and one backward pass, with the loss of `surgeon`'s measurement."""
    stack = structure.stacks[0]
    attentions = [s for s in structure.sublayers if s.kind == "heads"]
    totals = [[torch.zeros(s.units, s.width, s.width, device=s.weight.device) for _ in range(3)] for s in attentions]
    tokens, batch = 0, batches[0]

    def watch(number: int, which: int, output: Tensor) -> None:
        real = _real(stack, batch, output)
        values = output.detach().float()
        if which:  # keys, less their example's mean
            values = values - (values * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        else:
            output.register_hook(lambda g: _add(totals[number][2], g.float() * real))
        _add(totals[number][which], values * real)

    model = structure.model
    with frozen(model), kernels(model, precision), differentiable(structure) as leaves, ExitStack() as hooks:
        for number, sublayer in enumerate(attentions):
            for which in (0, 1):
                module = sublayer.inputs[which].module
                handle = module.register_forward_hook(lambda m, a, output, n=number, w=which: watch(n, w, output))
                hooks.callback(handle.remove)
        for given in batches:
            batch = given.to(device_of(structure.model))
            outputs = run(structure.model, batch, precision)
            tokens += int(next(iter(batch.masks.values())).sum())
            example_losses(structure.model, outputs, batch, seed=seed, labels=False).sum().backward(inputs=leaves)
            leaves.clear()
    return [ScoreMoments(*(total.double() / tokens for total in three)) for three in totals]


def _real(stack: Stack, batch: Batch, output: Tensor) -> Tensor:
    """[B, S, 1]: one for every token that is not padding."""
    real = stack.real_tokens(batch, output.shape[:2])
    ones = torch.ones(output.shape[:2]) if real is None else real.float()
    return ones[..., None].to(output.device)


def _add(total: Tensor, values: Tensor) -> None:
    """total [heads, d, d] += the Gram matrix of every head, from [B, S, heads x d]."""
    rows = values.flatten(0, 1).unflatten(-1, (len(total), -1)).transpose(0, 1)  # [heads, tokens, d]
    total += rows.mT @ rows
