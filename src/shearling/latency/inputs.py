"""Random inputs of a given shape, for timing."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shearling.engine.hooks import device_of
from shearling.errors import InputError
from shearling.models.positions import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORDINARY = 10  # lower token ids are special tokens in most vocabularies


def example_inputs(model: PreTrainedModel, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Random inputs, always the same, without padding. Models of images and fixed-length audio use their own size.

    Without an attention mask, because transformers would check on the device whether it is all ones; that synchronises
    and hides whether host or device is the bottleneck.
    """
    for name, value in {"batch size": batch_size, "length": seq_len}.items():
        if value < 1:
            raise InputError(f"A {name} of {value} makes no sense; give at least 1.")
    accepted = inspect.signature(model.forward).parameters
    config, draw = model.config, torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {}
    if "spatial_shapes" in accepted:
        inputs |= _patches(getattr(config, "vision_config", config), batch_size, draw)
    elif "pixel_values" in accepted:
        inputs["pixel_values"] = _images(getattr(config, "vision_config", config), batch_size, draw)
    if "input_features" in accepted:
        inputs["input_features"] = torch.randn(
            batch_size, config.num_mel_bins, 2 * config.max_source_positions, generator=draw
        )
    if "input_values" in accepted:
        inputs["input_values"] = torch.randn(batch_size, (seq_len + 1) * _samples_per_token(model), generator=draw)
    if "input_ids" in accepted:
        inputs["input_ids"] = _tokens(getattr(config, "text_config", config), batch_size, seq_len, draw)
    if not inputs:
        raise InputError(
            f"{type(model).__name__} takes none of input_ids, pixel_values, input_values and input_features; "
            "give profile(..., inputs={...}) yourself."
        )
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = _tokens(config, batch_size, seq_len, draw)
    return placed(inputs, model)


def shape_of_inputs(inputs: dict[str, Tensor]) -> tuple[int, int]:
    """(batch size, length) of the caller's own inputs; the length is the second dimension, if any."""
    tensors = [inputs[name] for name in ("input_ids", *inputs) if name in inputs and inputs[name].dim()]
    if not tensors:
        raise InputError(f"The inputs {sorted(inputs)} have no tensor with a batch dimension.")
    return len(tensors[0]), tensors[0].shape[1] if tensors[0].dim() > 1 else 1


def placed(inputs: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Move inputs to the model's device, floats to its dtype."""
    device = device_of(model)
    return {k: v.to(device, model.dtype if v.is_floating_point() else None) for k, v in inputs.items()}


def _tokens(config: Any, batch_size: int, seq_len: int, draw: torch.Generator) -> Tensor:
    longest = positions_of(config)
    if longest is not None and longest < seq_len:
        raise InputError(f"A length of {seq_len} is more than the {longest} positions this model has.")
    size = int(config.vocab_size)
    ids = torch.randint(min(ORDINARY, size // 2), size, (batch_size, seq_len), generator=draw)
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < size:
        ids[ids == end] = size - 1 if end != size - 1 else size - 2
        ids[:, -1] = end  # some heads look for the end token
    return ids


def _patches(config: Any, batch_size: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Square images, already cut into patches."""
    side = max(1, int(config.num_patches**0.5))
    size = getattr(config, "num_channels", 3) * config.patch_size**2
    return {
        "pixel_values": torch.randn(batch_size, side**2, size, generator=draw),
        "pixel_attention_mask": torch.ones(batch_size, side**2, dtype=torch.long),
        "spatial_shapes": torch.full((batch_size, 2), side),
    }


def _samples_per_token(model: Any) -> int:
    """How many samples of sound make one of the model's tokens."""
    known = getattr(model.config, "inputs_to_logits_ratio", None)
    if known is not None:
        return int(known)
    many = 10**6
    return many // max(1, int(model._get_feat_extract_output_lengths(torch.tensor(many))))


def _images(config: Any, batch_size: int, draw: torch.Generator) -> Tensor:
    size = getattr(config, "image_size", None)
    if size is None:
        raise InputError(f"The configuration of this {config.model_type} does not say how large its images are.")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(batch_size, getattr(config, "num_channels", 3), height, width, generator=draw)
