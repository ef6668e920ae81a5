"""Models of sentence-transformers: take the transformer out of one, put the pruned one in, save it whole.

A SentenceTransformer or CrossEncoder is a list of modules whose first is a transformer. That one is pruned; pooling,
Dense and Normalize modules, prompts, the longest text and the similarity stay as they are. The library itself is
never imported here: whoever brings such a model has done so.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shearling.checkpoint.save import write_checkpoint
from shearling.checkpoint.sentence import modes_of
from shearling.engine.silence import quiet_transformers
from shearling.errors import ModelError
from shearling.files import whole_directory
from shearling.models.pooling import ACTIVATIONS, Mode, Pooling, Projection, set_pooling
from shearling.pipeline import Plan, Pruned

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_sentence_model(value: Any) -> bool:
    """Whether this is a SentenceTransformer or a CrossEncoder (or a class made from one)."""
    names = {base.__name__ for base in type(value).__mro__ if base.__module__.split(".")[0] == "sentence_transformers"}
    return bool(names & {"SentenceTransformer", "CrossEncoder"})


def transformer_of(model: Any) -> PreTrainedModel:
    """The transformer inside, which knows its pooling from now on."""
    from transformers import PreTrainedModel

    found = model.transformers_model if hasattr(model, "transformers_model") else model[0].auto_model
    if not isinstance(found, PreTrainedModel):
        raise ModelError(
            f"The first module of this {type(model).__name__} runs a {type(found).__name__}; "
            "load it with backend='torch' to prune it."
        )
    pooling = pooling_from(model)
    if pooling is not None:
        set_pooling(found, pooling)
    return found


def pooling_from(model: Any) -> Pooling | None:
    """How the modules after the transformer make embeddings; None where they do not, as in a CrossEncoder."""
    modes: tuple[Mode, ...] | None = None
    dense: list[Projection] = []
    normalize = False
    for module in model:
        kind = type(module).__name__
        if kind == "Pooling":
            modes = modes_of(module.get_config_dict(), "the Pooling module")
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense" and modes is not None:
            dense.append(_projection(module))
    if modes is None:
        return None
    return Pooling(
        modes=modes,
        normalize=normalize,
        similarity=str(model.similarity_fn_name or "cosine"),
        dense=tuple(dense),
        prompts={name: text for name, text in (model.prompts or {}).items() if text is not None},
        default=model.default_prompt_name,
        max_length=model.max_seq_length,
    )


def _projection(module: Any) -> Projection:
    linear: nn.Linear = module.linear
    activation = type(module.activation_function).__name__
    if activation not in ACTIVATIONS or getattr(module, "use_residual", False):
        raise ModelError(f"The model has a Dense module with {activation} (or a residual), which shearling cannot run.")
    bias = None if linear.bias is None else linear.bias.detach().cpu()
    return Projection(linear.weight.detach().cpu(), bias, activation)


def with_transformer(model: Any, transformer: PreTrainedModel) -> Any:
    """A copy of the model with this transformer in place of its own; the model itself is left as it is."""
    # deepcopy takes what its memo holds for the copy, so the dense weights are never copied.
    return copy.deepcopy(model, {id(transformer_of(model)): transformer})


def save(
    model: Any,
    kept: Sequence[Tensor],
    report: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Path:
    """A directory that both `SentenceTransformer(directory)` (or CrossEncoder) and `shearling.load` read."""
    target = Path(directory)
    with whole_directory(target, force=force) as folder:
        with quiet_transformers():
            model.save_pretrained(str(folder), create_model_card=False)
        write_checkpoint(transformer_of(model), kept, report, folder, None)
    return target


@dataclass(frozen=True, repr=False)
class PrunedSentenceModel(Pruned):
    """The result for a SentenceTransformer or CrossEncoder: `model` is one of them, with a smaller transformer."""

    model: Any

    def save(self, directory: str | os.PathLike[str], *, source: Any = None, force: bool = False) -> Path:
        """Write a directory that `SentenceTransformer(directory)` (or CrossEncoder) and `shearling.load` read.

        The model brings its tokenizer and other modules along, so `source` is not asked for anything.
        """
        return save(self.model, self.kept, self.report.to_json(), directory, force=force)


def give_back(pruned: Pruned, sentence: Any) -> PrunedSentenceModel:
    """The result as the caller gave it: the pruned transformer in a copy of the model around it."""
    return PrunedSentenceModel(with_transformer(sentence, pruned.model), pruned.kept, pruned.report)


@dataclass(frozen=True)
class SentencePlan(Plan):
    """A measurement whose results are models of sentence-transformers."""

    sentence: Any = None

    def _prune(self, *given: Any, **named: Any) -> PrunedSentenceModel:
        return give_back(super()._prune(*given, **named), self.sentence)


def sentence_plan(plan: Plan, sentence: Any) -> SentencePlan:
    """The same measurement, for the model that the transformer came in."""
    return SentencePlan(**{one.name: getattr(plan, one.name) for one in fields(plan)}, sentence=sentence)
