"""Unsupported families with the reason; the kind of a model, to name the nearest supported family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ModelKind = Literal["encoder", "decoder", "encoder-decoder", "vision", "speech", "mixture of experts"]

NEAREST: dict[ModelKind, str] = {  # a supported family of each kind
    "encoder": "bert",
    "decoder": "llama",
    "encoder-decoder": "bart",
    "vision": "vit",
    "speech": "wav2vec2",
    "mixture of experts": "qwen3",
}


@dataclass(frozen=True)
class Refused:
    """A family without a row: its kind, the reason, and the nearest supported family if not the kind's default."""

    kind: ModelKind
    reason: str
    nearest: str = ""


EXPERTS = "it is a mixture of experts: their filters lie in one three-dimensional tensor, not in linear modules"
_ALIBI = "its ALiBi bias has a slice for every head and is handed on from layer to layer"
_STATES = "its layers keep a state instead of attention heads"
_LATENT = "its heads read keys and values from one compressed projection"
_SPREAD = "its attentions and FFNs lie in lists of their own, so that no layer can be run by itself"
UNSUPPORTED: dict[str, Refused] = {
    "bloom": Refused("decoder", _ALIBI, "gpt_neox"),
    "convbert": Refused("encoder", "some of its heads are convolutions", "electra"),
    "dbrx": Refused("mixture of experts", EXPERTS),
    "deepseek_v2": Refused("mixture of experts", EXPERTS),
    "deepseek_v3": Refused("mixture of experts", EXPERTS),
    "flaubert": Refused("encoder", _SPREAD, "camembert"),
    "funnel": Refused("encoder", "its layers shorten the sequence between attention and residual"),
    "gpt_oss": Refused("mixture of experts", EXPERTS),
    "granitemoe": Refused("mixture of experts", EXPERTS, "granite"),
    "longformer": Refused("encoder", "its global attention has projections of its own", "roberta"),
    "longt5": Refused("encoder-decoder", "its encoder attends in blocks, with a position bias for a block", "t5"),
    "mamba": Refused("decoder", _STATES),
    "mamba2": Refused("decoder", _STATES),
    "minicpm3": Refused("decoder", _LATENT),
    "mixtral": Refused("mixture of experts", EXPERTS, "mistral"),
    "mpt": Refused("decoder", _ALIBI, "gpt_neox"),
    "olmoe": Refused("mixture of experts", EXPERTS, "olmo2"),
    "phimoe": Refused("mixture of experts", EXPERTS, "phi3"),
    "qwen2_moe": Refused("mixture of experts", EXPERTS, "qwen2"),
    "qwen3_moe": Refused("mixture of experts", EXPERTS, "qwen3"),
    "reformer": Refused("decoder", "its layers share one projection for queries and keys, and run in both directions"),
    "rwkv": Refused("decoder", _STATES),
    "swinv2": Refused("vision", "a network makes its position bias for all heads at once", "swin"),
    "switch_transformers": Refused("mixture of experts", EXPERTS, "t5"),
    "umt5": Refused("encoder-decoder", "every layer has a position bias of its own, a slice for every head", "t5"),
    "wavlm": Refused("speech", "a gate over all heads shapes its position bias"),
    "xlm": Refused("encoder", _SPREAD, "xlm-roberta"),
    "xlnet": Refused("encoder", "its projections are three-dimensional tensors, not linear modules"),
}


def kind_of(config: Any) -> ModelKind:
    """Guess the kind of a model from the fields of its configuration."""

    def has(*names: str) -> bool:
        return any(getattr(config, name, None) for name in names)

    if has("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        return "mixture of experts"
    if has("conv_dim", "num_mel_bins", "feat_extract_norm", "sampling_rate"):
        return "speech"
    if has("image_size", "patch_size", "vision_config"):
        return "vision"
    if has("is_encoder_decoder"):
        return "encoder-decoder"
    heads = " ".join(getattr(config, "architectures", None) or [])
    if has("is_decoder", "num_key_value_heads", "rope_parameters") or "CausalLM" in heads or "LMHead" in heads:
        return "decoder"
    return "encoder"
