"""Inputs to trace a model with and to check the result with: of several shapes, so that dynamic ones are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shearling.errors import ModelError
from shearling.sample.batch import LABELS
from shearling.sample.read import accepted_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Inputs = dict[str, Tensor]

EXAMPLES = 64  # of the data, to check with
CALIBRATION = 256  # of the data, to take the ranges of activations from
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Any, task: Any, *, max_length: int | None = None,
    samples: int = EXAMPLES, seed: int = 0,
) -> list[Inputs]:  # fmt: skip
    """Batches of real examples; the first has several, the last is a single example."""
    from shearling.data import encode

    batches = encode(
        rows, tokenizer, task, model_config=model.config, max_length=max_length, batch_size=16, samples=samples,
        labels="ignore", seed=seed,
    )  # fmt: skip
    return _tried(model, [dict(batch) for batch in batches])


def inputs_from_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[Inputs]:
    """Batches of the sentences above; for models of pictures and sound, of noise in the shape they take."""
    name = model.main_input_name
    if name != "input_ids":
        return _tried(model, [_noise(model, name)])
    if tokenizer is None:
        return _tried(model, [_random_tokens(model)])
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
    """What the forward takes of the batches, and one example on its own."""
    wanted = accepted_by(model).names
    kept = [{k: v for k, v in batch.items() if (not wanted or k in wanted) and k not in LABELS} for batch in batches]
    if getattr(model.config, "type_vocab_size", 2) < 2:
        kept = [{k: v for k, v in batch.items() if k != "token_type_ids"} for batch in kept]
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in wanted:
        kept = [{"decoder_input_ids": _decoder_tokens(model, batch), **batch} for batch in kept]
    if "pixel_values" in wanted and "input_ids" in kept[0] and hasattr(model.config, "vision_config"):
        pictures = [_noise(model, "pixel_values")["pixel_values"][:1] for _ in kept]  # a model of texts and pictures
        kept = [
            batch | {"pixel_values": picture.repeat(len(batch["input_ids"]), 1, 1, 1)}
            for batch, picture in zip(kept, pictures, strict=True)
        ]
    if len(kept[0][next(iter(kept[0]))]) < 2:  # a batch of one would be taken for the only size there is
        kept[0] = {k: torch.cat([v, v]) for k, v in kept[0].items()}
    return [*kept, {k: v[:1] for k, v in kept[0].items()}]


def _decoder_tokens(model: PreTrainedModel, batch: Inputs) -> Tensor:
    """Something to decode: the text itself, or the first tokens after other inputs."""
    if "input_ids" in batch:
        return batch["input_ids"]
    start = int(getattr(model.config, "decoder_start_token_id", None) or 0)
    return torch.full((len(next(iter(batch.values()))), 4), start)


def _random_tokens(model: PreTrainedModel) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    length = min(int(getattr(config, "max_position_embeddings", None) or 32), 64) // 2
    ids = torch.randint(3, int(config.vocab_size), (4, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _noise(model: PreTrainedModel, name: str) -> Inputs:
    """Noise in the shape that the configuration names."""
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    shapes = {
        "pixel_values": (getattr(config, "num_channels", 3), height, width),
        "input_values": (16_000,),
        "input_features": (getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)),
    }
    if name not in shapes or None in shapes[name]:
        raise ModelError(f"{type(model).__name__} takes '{name}', and its configuration does not say in what shape.")
    return {name: torch.randn(2, *shapes[name], generator=torch.Generator().manual_seed(0))}
