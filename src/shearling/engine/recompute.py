"""Gradient checkpointing: recompute a layer's activations in the backward pass instead of storing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint

from shearling.engine.layerwise import replaced
from shearling.models.structure import Structure
from shearling.sample.batch import Batch

MOST = 2**30  # bytes of activations that a CPU stores; on a GPU the batch size is the limit


def kept_bytes(structure: Structure, tokens: int) -> int:
    """Approximate bytes of activations stored for a backward pass over `tokens` tokens, in float32.

    A sublayer stores about six vectors of the residual's width, and three of its units' total width (gated FFN: both
    factors and the activation; attention: queries, keys and values).
    """
    sublayers = structure.sublayers
    return 4 * tokens * sum(s.repeats * (6 * s.weight.shape[0] + 3 * s.units * s.width) for s in sublayers)


def is_too_much(structure: Structure, batches: Sequence[Batch]) -> bool:
    """Whether the activations of all layers exceed the CPU limit in the largest batch."""
    tokens = max(batch.inputs["input_ids"].numel() if "input_ids" in batch.inputs else 0 for batch in batches)
    return kept_bytes(structure, tokens) > MOST


@contextmanager
def recomputed(structure: Structure) -> Iterator[None]:
    """Make every layer store only its input. Hooks inside a layer run again during the backward pass."""
    with ExitStack() as places:
        for layer in dict.fromkeys(layer for stack in structure.stacks for layer in stack.layers):
            places.enter_context(replaced(layer, partial(checkpoint, layer.forward, use_reentrant=False)))
        yield
