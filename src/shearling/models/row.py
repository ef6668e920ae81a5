"""The words a row of the architecture table is written in.

A row says where the modules of a family are. It holds paths and attribute names, never arithmetic; what follows from
them (counts, costs, slices) is worked out in `structure.py` and `shrink.py` for all families alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["heads", "filters"]
EVERY = 1 << 30  # a floor above any number of units


@dataclass(frozen=True)
class Fused:
    """One projection that holds several blocks of the same units, one after the other (q, k and v; input and gate).

    In the first block a unit has as many rows as it has columns of `h`; the others share the rest equally, so that
    queries may have more rows than keys and values.
    """

    path: str
    blocks: int


@dataclass(frozen=True)
class Along:
    """A parameter that is no linear module's weight or bias, and has entries for each unit along one dimension."""

    path: str
    dim: int = 0


@dataclass(frozen=True)
class Positions:
    """Relative positions that are projected head by head, as the tokens are (DeBERTa).

    paths  their own projections; where a variant lacks them, the positions go through those of the tokens
    span   the attribute that says how far positions reach: a table of 2 x span rows is projected
    kinds  the attribute that lists the products with that table, one for each projection
    cut    whether the table is cut to the positions that a sequence of its length can have
    """

    paths: tuple[str, ...]
    span: str
    kinds: str
    cut: bool = False


@dataclass(frozen=True)
class Pick:
    """An argument of the core that has a slice for every head of the dense model: [., heads, queries, keys].

    One such tensor serves all layers, so it cannot be cut; each layer picks the slices of the heads it kept.

    argument  the name of the core's argument
    made_by   the method of the core that makes the tensor where none is handed in
    returned  the place among the core's return values where the whole tensor is handed on; -1 for nowhere
    """

    argument: str
    made_by: str = ""
    returned: int = -1


@dataclass(frozen=True)
class Part:
    """One sublayer of a layer; every path starts at the layer.

    core       the module that turns the sublayer's input into `h`, or into the output when `out` lies inside it
    inputs     the projections whose rows belong to units; a path that a variant lacks is skipped
    out        the output projection: masks act on its input `h`
    residual   the module whose input is the residual `x`; the core, unless a norm comes before it
    place      which of that module's inputs it is
    returns    how many values the core returns
    counters   attributes that count units (or their columns) and shrink with them; of the core's configuration too
    own        other parameters with entries for each unit
    scale      a parameter or number that multiplies the output before it meets the residual (LayerScale)
    norm       the norm between output and residual, where there is one: the refit then aims at the output alone
    windows    the attribute with the side of the windows it runs in, where it does: the tokens are then not in the
               order of the residual, and the refit aims at the output alone
    across     whether keys and values are of the encoder's tokens (cross-attention): the first input is the query's
    beside     whether it reads the same residual as the sublayer before it, and both outputs are added to that
    size       the attribute with the size of a head, where the configuration does not tell
    floor      units that must stay in every layer; EVERY where none may go
    pick       an argument that has to be indexed by the heads that are left
    positions  relative positions that are projected too
    """

    kind: Kind
    core: str
    inputs: tuple[str | Fused, ...]
    out: str
    residual: str = ""
    place: int = 0
    returns: int = 1
    counters: tuple[str, ...] = ()
    own: tuple[Along, ...] = ()
    scale: str = ""
    norm: str = ""
    windows: str = ""
    across: bool = False
    beside: bool = False
    size: str = ""
    floor: int = 0
    pick: Pick | None = None
    positions: Positions | None = None

    @property
    def residual_path(self) -> str:
        """Where the residual input can be seen."""
        return self.residual or self.core


@dataclass(frozen=True)
class StackRow:
    """A pile of equal layers. Of several that name the same layers, the first that fits the model is taken.

    layers      the path of the pile, from the base model
    mask        the input that tells real tokens from padding; empty where there is no padding
    fallback    the input to use instead where the model was given no inputs for its decoder
    frames      the method that turns the mask over samples into one over frames (speech)
    config      where the configuration of this pile lies in the model's, if not at its top
    heads       the field of that configuration with the number of heads
    groups      the field with the number of key-value heads, if the family has one; or that number itself
    when        fields of that configuration that must be true for this row to fit, or false after a "not ";
                several are joined by " and "
    keep_first  units that must stay in the first attention (of each type): the KV cache reads its length there
    repeats     the field with the number of times each layer runs, where layers share weights

    For stock shapes, which the configuration alone must tell:

    filters     the field with the width of every FFN; empty where none says it, and the width stays
    times       the field that the width is a multiple of, where `filters` has the factor
    depth       the field with the number of layers; empty where none says it, and all layers stay
    head_size   the field with the size of a head; empty where that is the hidden size over the heads, which all stay
    first       whether the first layer differs from the others in its modules, and has to stay
    unless      a field of that configuration which ties a weight to the number of layers: all stay where it is true
    """

    layers: str
    parts: tuple[Part, ...]
    mask: str = "attention_mask"
    fallback: str = ""
    frames: str = ""
    config: str = ""
    heads: str = "num_attention_heads"
    groups: str | int = "num_key_value_heads"
    when: str = ""
    keep_first: int = 0
    repeats: str = ""
    filters: str = "intermediate_size"
    times: str = ""
    depth: str = "num_hidden_layers"
    head_size: str = ""
    first: bool = False
    unless: str = ""


@dataclass(frozen=True)
class Row:
    """One family: the `model_type`s it serves and the stacks of layers in it.

    refuses  (field of the configuration, the most it may be, why more cannot be pruned)
    note     what a user should know, for `shearling architectures`
    uneven   why the family has no stock shapes, where it has none
    """

    model_types: tuple[str, ...]
    stacks: tuple[StackRow, ...]
    refuses: tuple[tuple[str, int, str], ...] = ()
    note: str = ""
    uneven: str = ""
