"""The words a row of the architecture table is written in.

A row says where the modules of a family are. It holds paths and attribute names, never arithmetic; what follows from
them (counts, costs, slices) is worked out in `structure.py` and `shrink.py` for all families alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["heads", "filters"]


@dataclass(frozen=True)
class Fused:
    """One projection that holds several blocks of the same units, one after the other (q, k and v; input and gate)."""

    path: str
    blocks: int


@dataclass(frozen=True)
class Part:
    """One sublayer of a layer; every path starts at the layer.

    core      the module that turns the sublayer's input into `h`, or into the output when `out` lies inside it
    inputs    the projections whose rows belong to units; a path that a variant lacks is skipped
    out       the output projection: masks act on its input `h`
    residual  the module whose input is the residual `x`; the core, unless a norm comes before it
    returns   how many values the core returns
    counters  attributes that count units (or their columns) and shrink with them
    scale     a parameter that multiplies the output before it meets the residual (LayerScale)
    """

    kind: Kind
    core: str
    inputs: tuple[str | Fused, ...]
    out: str
    residual: str = ""
    returns: int = 1
    counters: tuple[str, ...] = ()
    scale: str = ""

    @property
    def residual_path(self) -> str:
        """Where the residual input can be seen."""
        return self.residual or self.core


@dataclass(frozen=True)
class StackRow:
    """A pile of equal layers: its path from the base model, and which input masks its padding."""

    layers: str
    parts: tuple[Part, ...]
    mask: str = "attention_mask"
    config: str = ""


@dataclass(frozen=True)
class Row:
    """One family: the `model_type`s it serves and the stacks of layers in it."""

    model_types: tuple[str, ...]
    stacks: tuple[StackRow, ...]
    keep_first: int = 0  # units that must stay in the attention of layer 0 (the KV cache reads its length there)
    note: str = ""
