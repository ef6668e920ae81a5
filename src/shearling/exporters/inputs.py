"""Inputs for tracing a model and checking the result, of several shapes to test dynamic axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shearling.latency.inputs import example_inputs
from shearling.sample.batch import LABELS
from shearling.sample.read import accepted_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Inputs = dict[str, Tensor]

EXAMPLES = 64  # of the data, for checking
CALIBRATION = 256  # of the data, for activation ranges
TEXTS = (
    "The second half of the story is better than the first, and the ending is worth the wait.",
    "No.",
    "Who wrote the letter that arrived on Tuesday?",
    "It rained for three days; on the fourth, the river left its bed and took the old bridge along.",
    "A plain, honest meal at a fair price.",
    "Nothing in the report explains why the numbers differ, so the committee asked for another one, "
    "which came a month later and did not explain it either.",
)


def inputs_from_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Any, task: Any, *, samples: int = EXAMPLES,
    seed: int = 0, text_columns: Sequence[str] | None = None,
) -> list[Inputs]:  # fmt: skip
    """Batches of real examples; the first has several, the last only one."""
    from shearling.data import encode

    batches = encode(
        rows, tokenizer, task, model_config=model.config, batch_size=16, samples=samples, labels="ignore",
        seed=seed, text_columns=text_columns,
    )  # fmt: skip
    return _tried(model, [dict(batch) for batch in batches])


def inputs_from_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[Inputs]:
    """Batches of `TEXTS`, or of random inputs without a tokenizer."""
    if model.main_input_name != "input_ids" or tokenizer is None:
        return _tried(model, [_noise(model)])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    limit = min(int(getattr(model.config, "max_position_embeddings", None) or 512), 512) // 2
    encoded = [
        tokenizer(list(texts), padding=True, truncation=True, max_length=limit, padding_side="right",
                  return_tensors="pt")
        for texts in (TEXTS[:4], TEXTS)
    ]  # fmt: skip
    return _tried(model, [dict(batch) for batch in encoded])


def _tried(model: PreTrainedModel, batches: list[Inputs]) -> list[Inputs]:
    """Keep the inputs that forward accepts, and append a batch of one example."""
    wanted = accepted_by(model).names
    kept = [{k: v for k, v in batch.items() if (not wanted or k in wanted) and k not in LABELS} for batch in batches]
    if getattr(model.config, "type_vocab_size", 2) < 2:
        kept = [{k: v for k, v in batch.items() if k != "token_type_ids"} for batch in kept]
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in wanted:
        kept = [{"decoder_input_ids": _decoder_tokens(model, batch), **batch} for batch in kept]
    if "pixel_values" in wanted and "input_ids" in kept[0] and hasattr(model.config, "vision_config"):
        pictures = _noise(model, max(len(batch["input_ids"]) for batch in kept))["pixel_values"]
        kept = [{"pixel_values": pictures[: len(batch["input_ids"])], **batch} for batch in kept]
    if len(kept[0][next(iter(kept[0]))]) < 2:  # torch.export would specialise on a batch of one
        kept[0] = {k: torch.cat([v, v]) for k, v in kept[0].items()}
    return [*kept, {k: v[:1] for k, v in kept[0].items()}]


def _decoder_tokens(model: PreTrainedModel, batch: Inputs) -> Tensor:
    """Decoder inputs: the text itself, or start tokens for other media."""
    if "input_ids" in batch:
        return batch["input_ids"]
    start = int(getattr(model.config, "decoder_start_token_id", None) or 0)
    return torch.full((len(next(iter(batch.values()))), 4), start)


def _noise(model: PreTrainedModel, count: int = 4) -> Inputs:
    """Random inputs; the second half of every text but the first is padding."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(int(positions or 32), 64) // 2
    inputs = example_inputs(model, count, length)
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1:, length // 2 :] = 0
    return inputs
