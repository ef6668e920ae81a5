"""Models of sentence-transformers: prune the transformer inside, and put it back.

A SentenceTransformer or CrossEncoder is a list of modules whose first is a transformer. Only this one is pruned;
pooling, Dense and Normalize modules, prompts, maximum length and similarity are kept. The library is not imported
here: a caller with such a model has imported it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.sentence import SentenceModule, pooling_of_parts
from shearling.engine.progress import Watcher
from shearling.errors import ModelError
from shearling.models.pooling import Pooling, set_pooling
from shearling.pipeline import Plan, Pruned
from shearling.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_sentence_model(value: Any) -> bool:
    """Whether this is a SentenceTransformer or CrossEncoder, or of a subclass."""
    names = {base.__name__ for base in type(value).__mro__ if base.__module__.split(".")[0] == "sentence_transformers"}
    return bool(names & {"SentenceTransformer", "CrossEncoder"})


def transformer_of(model: Any) -> PreTrainedModel:
    """The transformer inside, with the model's pooling attached."""
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
    """The pooling defined by the modules after the transformer; None for a CrossEncoder."""
    parts = []
    for number, module in enumerate(model):
        kind = type(module).__name__
        if kind in ("Pooling", "Normalize", "Dense"):
            weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
            config = {} if kind == "Normalize" else module.get_config_dict()
            parts.append(SentenceModule(kind, config, weights, f"module {number} of the model"))
    names = ("similarity_fn_name", "prompts", "default_prompt_name")
    settings = {name: getattr(model, name, None) for name in names}
    return pooling_of_parts(parts, settings, getattr(model, "max_seq_length", None))


@dataclass(frozen=True, repr=False)
class PrunedSentenceModel(Pruned):
    """The result for a SentenceTransformer or CrossEncoder: `model` is one with a smaller transformer."""

    model: Any

    @property
    def transformer(self) -> PreTrainedModel:
        """The transformer inside."""
        return transformer_of(self.model)


def give_back(pruned: Pruned, sentence: Any) -> PrunedSentenceModel:
    """Put the pruned transformer into a copy of the caller's model."""
    # The memo makes deepcopy use the pruned transformer instead of copying the dense one.
    whole = copy.deepcopy(sentence, {id(transformer_of(sentence)): pruned.model})
    return PrunedSentenceModel(whole, pruned.kept, pruned.report, pruned.flipped)


@dataclass(frozen=True)
class SentencePlan(Plan):
    """A plan whose results are models of sentence-transformers."""

    sentence: Any = None

    def meet(self, target: Target, watcher: Watcher | None = None) -> PrunedSentenceModel:
        """Like `Plan.meet`, with the transformer in a copy of the caller's model."""
        return give_back(super().meet(target, watcher), self.sentence)


def sentence_plan(plan: Plan, sentence: Any) -> SentencePlan:
    """The plan for the model that contains the transformer."""
    return SentencePlan(**{one.name: getattr(plan, one.name) for one in fields(plan)}, sentence=sentence)
