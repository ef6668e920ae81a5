"""The classes that rows of the architecture table are made of.

A row says where the modules of a family are. It holds paths and attribute names, no arithmetic; counts, costs and
slices are derived from them in `structure.py` and `shrink.py`, for all families alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["heads", "filters"]
EVERY = 1 << 30  # a floor above any number of units


@dataclass(frozen=True)
class Fused:
    """One projection that concatenates several blocks of the same units (q, k and v; input and gate).

    In the first block a unit has as many rows as columns of `h`; the other blocks share the rest equally, because with
    grouped-query attention queries have more rows than keys and values.
    """

    path: str
    blocks: int


@dataclass(frozen=True)
class Along:
    """A parameter outside linear modules with entries per unit along dimension `dim`."""

    path: str
    dim: int = 0


@dataclass(frozen=True)
class Positions:
    """Relative positions that are projected per head, like the tokens (DeBERTa).

    paths  their own projections; where a variant lacks them, positions use the projections of the tokens
    span   attribute with the maximum distance: a table of 2 x span rows is projected
    kinds  attribute that lists the products with that table, one per projection
    cut    whether only the rows that a sequence of its length can reach are projected
    """

    paths: tuple[str, ...]
    span: str
    kinds: str
    cut: bool = False


@dataclass(frozen=True)
class Pick:
    """An argument of the core with a slice per head of the dense model: [., heads, queries, keys].

    One such tensor is shared by all layers, so it cannot be cut; each layer indexes the slices of its kept heads.

    argument  name of the core's argument
    made_by   method of the core that computes the tensor when none is passed
    returned  index among the core's return values at which the whole tensor is passed on; -1 if it is not
    """

    argument: str
    made_by: str = ""
    returned: int = -1


@dataclass(frozen=True)
class Part:
    """One sublayer of a layer; paths are relative to the layer.

    core       module that turns the sublayer's input into `h`, or into the output if it contains `out`
    inputs     projections whose rows belong to units; paths that a variant lacks are skipped
    out        output projection: masks act on its input `h`
    residual   module whose input is the residual `x`; the core, unless a norm precedes it
    place      index of the residual among that module's inputs
    returns    number of values the core returns
    counters   attributes that count units (or their columns) and shrink with them; also of the core's configuration
    own        other parameters with entries per unit
    scale      parameter or number that multiplies the output before the residual is added (LayerScale)
    norm       norm between output and residual, if any: the refit then targets the output alone
    windows    attribute with the window size, for windowed attention: tokens are then not in the order of the
               residual, and the refit targets the output alone
    across     cross-attention: keys and values come from the encoder's tokens, the first input is the query
    beside     whether it runs in parallel with the sublayer before it, on the same residual
    size       attribute with the head size, where the configuration lacks it
    floor      units that must stay in every layer; EVERY where none may be removed
    pick       argument that has to be indexed by the kept heads
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
        """Path of the module whose input is the residual."""
        return self.residual or self.core


@dataclass(frozen=True)
class StackRow:
    """A stack of equal layers. Of several rows for the same layers, the first that fits the model is used.

    layers      path of the module list, from the base model
    mask        input that marks padding; empty where there is no padding
    fallback    input used instead when the model gets no inputs for its decoder
    frames      method that converts a mask over audio samples to one over frames (speech)
    config      attribute of the model's configuration with the configuration of this stack, if not the top level
    heads       configuration field with the number of heads
    groups      field with the number of key-value heads, if the family has one; or that number itself
    when        fields that must be true for this row to fit, or false after "not "; joined by " and "
    keep_first  units that must stay in the first attention (of each type): the KV cache reads its length there
    repeats     field with the number of times each layer runs, where layers share weights

    For stock shapes, which the configuration must describe completely:

    filters     field with the width of every FFN; empty: the width cannot change
    times       field that `filters` is multiplied by to get the width
    depth       field with the number of layers; empty: all layers stay
    head_size   field with the head size; empty: it is hidden size / heads, and all heads stay
    first       whether the first layer has other modules than the rest and has to stay
    unless      field that, if true, ties a weight to the number of layers: all layers stay
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

    refuses  (configuration field, its largest supported value, why more cannot be pruned)
    note     remark for `shearling architectures`
    uneven   why the family has no stock shapes, if it has none
    half     whether the modelling code runs under an autocast to bfloat16
    inside   of a model around a language model: (its path, the field of its configuration); the stacks are then those
             of its own family, with the path in front
    """

    model_types: tuple[str, ...]
    stacks: tuple[StackRow, ...] = ()
    refuses: tuple[tuple[str, int, str], ...] = ()
    note: str = ""
    uneven: str = ""
    half: bool = True
    inside: tuple[str, str] | None = None
