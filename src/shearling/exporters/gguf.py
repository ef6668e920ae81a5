"""GGUF for llama.cpp: equal layers as their own architecture, uneven ones as `deci`, with sizes per layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shearling.errors import ModelError
from shearling.exporters.formats import Job
from shearling.exporters.gguf_tokenizer import add_tokenizer
from shearling.exporters.rounded_layers import Scales, round_layers
from shearling.exporters.rounding import BLOCK, GRIDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# model_type of transformers -> architecture of llama.cpp, for equal layers
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
UNEVEN = "deci"
FILE_TYPES = {"float16": 1, "q8_0": 7, "q4_0": 2}  # llama_ftype of llama.h
EMBEDDINGS = ("token_embd.weight", "output.weight")  # written in q8_0 if the layers are in q4_0


@dataclass(frozen=True)
class Layer:
    """The sizes of a written layer."""

    heads: int
    groups: int  # key-value heads
    filters: int


def unsuited(model: PreTrainedModel) -> str | None:
    """Why llama.cpp cannot run the model, or None."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        return f"it is a {config.model_type}; GGUF is written for {', '.join(ARCHITECTURES)}"
    if model.get_output_embeddings() is None:
        return f"a {type(model).__name__} has no language-model head"
    if (rope := _rope(config)).get("rope_type", "default") not in ("default", "linear", "llama3"):
        return f"its rotary embedding is '{rope['rope_type']}'; default, linear and llama3 are written"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"it attends within a window of {config.sliding_window} tokens, which llama.cpp would ignore"
    return None


def write(job: Job) -> None:
    """Write model, sizes and tokenizer to one file; q4_0 uses calibration batches, if any, for rounding."""
    import gguf

    model, config = job.model, job.model.config
    layers = list(model.base_model.layers)
    even = is_even(model)
    sizes = [_sizes(layer, config, even=even) for layer in layers]
    architecture = ARCHITECTURES[config.model_type] if even else UNEVEN
    writer = gguf.GGUFWriter(str(job.path), architecture)
    _add_sizes(writer, model, sizes, even=even)
    writer.add_file_type(FILE_TYPES[job.precision])
    if job.tokenizer is None:
        raise ModelError("GGUF files include the tokenizer, but the model has none: copy its files to the model.")
    add_tokenizer(writer, job.tokenizer, int(config.vocab_size), job.source)
    calibrated = job.precision == "q4_0" and bool(job.calibration)
    scales = round_layers(model, job.calibration, GRIDS[job.precision]) if calibrated else {}
    for name, tensor, scale in _tensors(model, sizes, scales, paired=architecture != "qwen2"):
        precision = "q8_0" if job.precision == "q4_0" and name in EMBEDDINGS else job.precision
        _add_tensor(writer, name, tensor, precision, scale)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_even(model: PreTrainedModel) -> bool:
    """Whether every layer has the sizes of the configuration."""
    config = model.config
    head = _head_size(config)
    for layer in model.base_model.layers:
        attention = layer.self_attn
        projections = ((attention, "q_proj"), (attention, "k_proj"), (layer.mlp, "gate_proj"))
        found = tuple(_rows(_projection(owner, name, config)) for owner, name in projections)
        if found != (config.num_attention_heads * head, config.num_key_value_heads * head, config.intermediate_size):
            return False
    return True


def _sizes(layer: Any, config: Any, *, even: bool) -> Layer:
    """The sizes of a layer, padded where llama.cpp needs it: it skips a layer without filters entirely."""
    head, attention = _head_size(config), layer.self_attn
    per_group = config.num_attention_heads // config.num_key_value_heads
    groups = _rows(_projection(attention, "k_proj", config)) // head
    filters = _rows(_projection(layer.mlp, "gate_proj", config))
    if even:
        return Layer(groups * per_group, groups, filters)
    if _projection(attention, "q_proj", config).bias is not None:
        # deci requires a query bias of the hidden size: removed groups are written as zeros.
        groups = config.hidden_size // (head * per_group)
        if groups * head * per_group != config.hidden_size:
            raise ModelError(
                f"llama.cpp's '{UNEVEN}' takes query biases only where the heads add up to the hidden size; here they "
                f"are {config.num_attention_heads} x {head}, and the hidden size is {config.hidden_size}. "
                "Prune with --shape stock."
            )
    elif groups == 0 and attention.o_proj.bias is not None:
        groups = 1
    return Layer(groups * per_group, groups, max(1, -(-filters // BLOCK)) * BLOCK)


def _add_sizes(writer: Any, model: PreTrainedModel, sizes: list[Layer], *, even: bool) -> None:
    config, rope, head = model.config, _rope(model.config), _head_size(model.config)
    writer.add_name(str(config._name_or_path or config.model_type).rstrip("/").rpartition("/")[2])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(sizes))
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(sizes[0].filters if even else [s.filters for s in sizes])
    writer.add_head_count(sizes[0].heads if even else [s.heads for s in sizes])
    writer.add_head_count_kv(sizes[0].groups if even else [s.groups for s in sizes])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
    if rope.get("rope_type") == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _tensors(model: PreTrainedModel, sizes: list[Layer], scales: Scales, *, paired: bool) -> Any:
    """Every tensor under llama.cpp's name, with the scales of its blocks if it is already rounded.

    paired  adjacent rotary pairs, as in llama and deci; transformers stores them half a head apart
    """
    base, head = model.base_model, _head_size(model.config)
    yield "token_embd.weight", base.embed_tokens.weight, None
    yield "output_norm.weight", base.norm.weight, None
    out = model.get_output_embeddings().weight
    if out is not base.embed_tokens.weight:
        yield "output.weight", out, None
    if _rope(model.config).get("rope_type") == "llama3":
        yield "rope_freqs.weight", _frequency_factors(model), None
    for i, (layer, size) in enumerate(zip(base.layers, sizes, strict=True)):
        width, narrow = size.heads * head, size.groups * head
        attention, ffn = layer.self_attn, layer.mlp
        gate, up = (_projection(ffn, name, model.config) for name in ("gate_proj", "up_proj"))
        parts = {"ffn_gate": (gate, size.filters, 0), "ffn_up": (up, size.filters, 0),
                 "ffn_down": (ffn.down_proj, 0, size.filters)}  # fmt: skip
        yield f"blk.{i}.ffn_norm.weight", layer.post_attention_layernorm.weight, None
        if size.heads:
            yield f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight, None
            q, k, v = (_projection(attention, name, model.config) for name in ("q_proj", "k_proj", "v_proj"))
            parts |= {"attn_q": (q, width, 0), "attn_k": (k, narrow, 0),
                      "attn_v": (v, narrow, 0), "attn_output": (attention.o_proj, 0, width)}  # fmt: skip
        for name, (linear, rows, columns) in parts.items():
            turn = head if paired and name in ("attn_q", "attn_k") else 0
            scale = scales.get(linear) if isinstance(linear, nn.Module) else None
            if scale is not None:
                scale = _paired(_padded(scale, rows, columns // BLOCK), turn)
            yield f"blk.{i}.{name}.weight", _paired(_padded(linear.weight, rows, columns), turn), scale
            if linear.bias is not None:
                yield f"blk.{i}.{name}.bias", _paired(_padded(linear.bias, rows, 0), turn), None


def _projection(owner: nn.Module, name: str, config: Any) -> Any:
    """A projection into the units; without rows if no unit is left."""
    return getattr(owner, name, None) or SimpleNamespace(weight=torch.zeros(0, config.hidden_size), bias=None)


def _padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Zero-pad to the given rows and columns; 0 means no padding."""
    missing = [0, max(0, rows - tensor.shape[0])]
    if tensor.dim() == 2:
        missing = [0, max(0, columns - tensor.shape[1]), *missing]
    return nn.functional.pad(tensor, missing) if any(missing) else tensor


def _paired(tensor: Tensor, head: int) -> Tensor:
    """Reorder the rows of each head so that pairs (i, i + head/2) are adjacent; keeps [heads x head, ...]."""
    if not head:
        return tensor
    split = tensor.reshape(-1, 2, head // 2, *tensor.shape[1:])  # [heads, 2, head / 2, ...]
    return split.transpose(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, name: str, tensor: Tensor, precision: str, scale: Tensor | None) -> None:
    """Vectors in float32, matrices in the precision; rows not divisible into blocks in float16."""
    import gguf

    values: NDArray[Any] = tensor.detach().to(torch.float32).contiguous().numpy()
    if values.ndim == 1:
        writer.add_tensor(name, values)
    elif precision in GRIDS and values.shape[1] % BLOCK == 0:
        kind = gguf.GGMLQuantizationType[precision.upper()]
        blocks = gguf.quants.quantize(values, kind) if scale is None else _four_bit_blocks(values, scale)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    else:
        limit = np.finfo(np.float16).max
        if np.abs(values).max(initial=0.0) > limit:
            raise ModelError(f"'{name}' has values outside the range of float16 ({limit:.0f}).")
        writer.add_tensor(name, values.astype(np.float16))


def _four_bit_blocks(values: NDArray[np.float32], scale: Tensor) -> NDArray[np.uint8]:
    """Encode weights as q4_0 blocks: a float16 scale, then codes 0 to 15, two per byte, half a block apart."""
    blocks = torch.from_numpy(values).unflatten(1, (-1, BLOCK))  # [D, blocks, BLOCK]
    codes = (GRIDS["q4_0"].codes(blocks, scale[..., None]) + 8).to(torch.uint8).numpy()
    halves = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    head = scale.numpy().astype(np.float16)[..., None].view(np.uint8)  # [D, blocks, 2]
    return np.concatenate([head, halves], -1).reshape(len(values), -1)


def _frequency_factors(model: PreTrainedModel) -> Tensor:
    """The divisors of the rotary frequencies in Llama 3's scaling."""
    config, head = model.config, _head_size(model.config)
    plain = torch.tensor(_rope(config)["rope_theta"]) ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    return torch.as_tensor(plain / model.base_model.rotary_emb.inv_freq.float().cpu())


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rows(linear: Any) -> int:
    return int(linear.weight.shape[0])
