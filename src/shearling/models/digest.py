"""A digest of a model's weights, to check that a measurement belongs to the model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

VALUES = 256  # evenly spaced values hashed per parameter


def weights_digest_of(model: nn.Module) -> str:
    """SHA-256 over names and shapes of all parameters and over evenly spaced values of each.

    Independent of the device; a dtype that rounds the weights changes it. Takes milliseconds.
    """
    digest = hashlib.sha256()
    named = sorted(model.named_parameters(), key=lambda pair: pair[0])
    for name, parameter in named:
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
    for _, parameter in named:
        if parameter.is_meta:
            continue
        values = parameter.detach().reshape(-1)
        if len(values) > VALUES:
            # Integer arithmetic: floats would round the positions in large parameters.
            values = values[torch.arange(VALUES, device=values.device) * (len(values) - 1) // (VALUES - 1)]
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()
