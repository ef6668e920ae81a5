"""How an embedding model turns hidden states into one vector: prompt, pooling, dense projections, normalisation.

The transformer's configuration does not have it. `checkpoint/sentence.py` reads it from the files beside the weights
and `set_pooling` attaches it to the loaded model, where it survives copies and pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.errors import InputError, ModelError

Mode = Literal["mean", "cls", "last", "max", "weighted_mean", "mean_sqrt_len"]
MODES: tuple[Mode, ...] = get_args(Mode)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}
_ATTRIBUTE = "_shearling_pooling"


@dataclass(frozen=True, eq=False)
class DenseModule:
    """A Dense module of sentence-transformers after the pooling: activation(W x + b)."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None
    activation: str = "Tanh"

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x)
        return ACTIVATIONS[self.activation](F.linear(x, self.weight.to(x), bias))


@dataclass(frozen=True)
class Pooling:
    """Turns hidden states [B, S, D] into embeddings.

    modes         pooling modes; the results of several are concatenated
    normalize     whether embeddings are scaled to unit length
    similarity    how users compare embeddings: cosine, dot, euclidean or manhattan
    dense         projections between pooling and normalisation
    prompts       prefixes of a text, by name ("query", "document", ...)
    default       name of the default prompt
    max_length    maximum tokens of a text; None leaves it to the tokenizer
    guessed       whether the model's files do not say how it pools
    """

    modes: tuple[Mode, ...] = ("mean",)
    normalize: bool = False
    similarity: str = "cosine"
    dense: tuple[DenseModule, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    max_length: int | None = None
    guessed: bool = False

    @property
    def direction_only(self) -> bool:
        """Whether only the direction of an embedding matters, not its length."""
        return not self.guessed and (self.normalize or self.similarity == "cosine")

    def prompt(self, use: Literal["query", "document"] | None = None) -> str:
        """The prompt for a query, a document, or any text, as sentence-transformers chooses it."""
        names = {"query": ("query",), "document": ("document", "passage", "corpus"), None: ()}[use]
        found = [self.prompts[name] for name in names if name in self.prompts]
        return found[0] if found else self.prompts.get(self.default or "", "")


GUESS = Pooling(guessed=True)


def set_pooling(model: nn.Module, pooling: Pooling) -> None:
    """Attach the pooling to a model; copies and pruned copies of the model keep it."""
    object.__setattr__(model, _ATTRIBUTE, pooling)


def pooling_of(model: nn.Module) -> Pooling:
    """The pooling attached to a model; default: mean over real tokens."""
    found: Pooling = getattr(model, _ATTRIBUTE, GUESS)
    return found


def parse_pooling(text: str) -> Pooling:
    """Parse the pooling option: `cls`, `mean,normalize`, ..."""
    words = [word.strip().lower().replace("-", "_") for word in text.split(",") if word.strip()]
    modes = tuple(mode for word in words for mode in MODES if word == mode)
    unknown = [word for word in words if word not in (*MODES, "normalize")]
    if unknown or not modes:
        raise InputError(f"No pooling '{text}'; there are {', '.join(MODES)}, each also with ',normalize'.")
    return Pooling(modes, normalize="normalize" in words)


def pool(outputs: Any, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """[B, D]: embeddings from the outputs of a model without a head and its attention mask [B, S]."""
    towers = [outputs[name].float() for name in ("text_embeds", "image_embeds") if name in outputs]
    if towers and len({len(tower) for tower in towers}) == 1:  # two-tower models have projections of their own
        return torch.cat(towers, -1)
    if "last_hidden_state" not in outputs:
        raise ModelError(f"The model returns {list(outputs)}: neither logits nor hidden states.")
    hidden: Tensor = outputs["last_hidden_state"]
    hidden = hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden
    if hidden.dim() == 4:  # [B, D, height, width] of a convolutional stage
        hidden = hidden.flatten(2).transpose(1, 2)
    real = mask if mask is not None and mask.shape == hidden.shape[:2] else hidden.new_ones(hidden.shape[:2])
    embedding = torch.cat([_POOLED[mode](hidden, real.to(hidden)) for mode in pooling.modes], -1)
    for project in pooling.dense:
        embedding = project(embedding)
    return F.normalize(embedding, dim=-1) if pooling.normalize else embedding


def _mean(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden * weight[..., None]).sum(1) / weight.sum(1, keepdim=True).clamp_min(1)


def _mean_sqrt_len(hidden: Tensor, real: Tensor) -> Tensor:
    return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp_min(1).sqrt()


def _weighted_mean(hidden: Tensor, real: Tensor) -> Tensor:
    """Weights 1, 2, 3, ... from the first real token."""
    return _mean(hidden, real * real.cumsum(1))


def _max(hidden: Tensor, real: Tensor) -> Tensor:
    return hidden.masked_fill(real[..., None] == 0, torch.finfo(hidden.dtype).min).amax(1)


def _cls(hidden: Tensor, real: Tensor) -> Tensor:
    """The first real token: padding may be on the left."""
    return hidden[torch.arange(len(hidden), device=hidden.device), real.argmax(1)]


def _last(hidden: Tensor, real: Tensor) -> Tensor:
    last = hidden.shape[1] - 1 - real.flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


_POOLED: dict[Mode, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _cls,
    "last": _last,
    "max": _max,
    "weighted_mean": _weighted_mean,
    "mean_sqrt_len": _mean_sqrt_len,
}
