"""Gradients without keeping what every layer computed: a layer's inside is computed again on the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint

from shearling.engine.layerwise import replaced
from shearling.models.structure import Structure
from shearling.sample.batch import Batch

MOST = 2**30  # bytes inside the layers that a CPU keeps; a GPU has its own limit in the size of its batches


def kept_bytes(structure: Structure, tokens: int) -> int:
    """About what a backward pass needs of the layers' insides, for so many tokens, in float32.

    A sublayer keeps what goes into its non-linear parts: some six vectors as wide as the residual, and three as wide
    as its units together (of a gated FFN: both factors and the activation; of attention: queries, keys and values).
    """
    sublayers = structure.sublayers
    return 4 * tokens * sum(s.repeats * (6 * s.weight.shape[0] + 3 * s.units * s.width) for s in sublayers)


def is_too_much(structure: Structure, batches: Sequence[Batch]) -> bool:
    """Whether the insides of all layers take more of a CPU's memory than is kept, in the largest batch."""
    tokens = max(batch.inputs["input_ids"].numel() if "input_ids" in batch.inputs else 0 for batch in batches)
    return kept_bytes(structure, tokens) > MOST


@contextmanager
def recomputed(structure: Structure) -> Iterator[None]:
    """Have every layer keep its input alone. Hooks inside a layer run again while gradients are computed."""
    with ExitStack() as places:
        for layer in dict.fromkeys(layer for stack in structure.stacks for layer in stack.layers):
            places.enter_context(replaced(layer, partial(checkpoint, layer.forward, use_reentrant=False)))
        yield
