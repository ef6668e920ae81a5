"""Unsupported families with the reason; the kind of a model, to name the nearest supported family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ModelKind = Literal[
    "encoder", "decoder", "encoder-decoder", "vision", "speech", "vision and language", "image-text towers",
    "mixture of experts",
]  # fmt: skip

NEAREST: dict[ModelKind, str] = {  # a supported family of each kind
    "encoder": "bert",
    "decoder": "llama",
    "encoder-decoder": "bart",
    "vision": "vit",
    "speech": "wav2vec2",
    "vision and language": "gemma3",
    "image-text towers": "clip",
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
    "big_bird": Refused("encoder", "its sparse attention reads random blocks that differ from head to head", "roberta"),
    "codegen": Refused("decoder", "its fused projection holds the heads in four equal groups", "gptj"),
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
    "wav2vec2-bert": Refused("speech", "its layers hold two FFNs at half weight and a convolution"),
    "wav2vec2-conformer": Refused("speech", "its layers hold two FFNs at half weight and a convolution"),
    "wavlm": Refused("speech", "a gate over all heads shapes its position bias"),
    "xlm": Refused("encoder", _SPREAD, "xlm-roberta"),
    "xlnet": Refused("encoder", "its projections are three-dimensional tensors, not linear modules"),
}


# Kinds by the auto classes of transformers that know a family. The first match counts: BERT is a masked model and
# can be a causal one. An auto class that a version of transformers lacks is skipped.
_AUTO: tuple[tuple[ModelKind, str], ...] = (
    ("vision and language", "IMAGE_TEXT_TO_TEXT"),
    ("image-text towers", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("speech", "SPEECH_SEQ_2_SEQ AUDIO_CLASSIFICATION CTC AUDIO_XVECTOR TEXT_TO_SPECTROGRAM"),
    ("encoder-decoder", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("vision", "IMAGE_CLASSIFICATION VIDEO_CLASSIFICATION BACKBONE SEMANTIC_SEGMENTATION IMAGE_SEGMENTATION "
               "UNIVERSAL_SEGMENTATION OBJECT_DETECTION DEPTH_ESTIMATION MASKED_IMAGE_MODELING IMAGE"),
    ("encoder", "MASKED_LM"),
    ("decoder", "CAUSAL_LM"),
    ("encoder", "TEXT_ENCODING QUESTION_ANSWERING"),
)  # fmt: skip


def kind_of(config: Any) -> ModelKind:
    """The kind of a model: by the auto classes that know its family, else by the fields of its configuration."""

    fields = vars(config)  # some configurations raise where layers differ in a field

    def has(*names: str) -> bool:
        return any(fields.get(name) for name in names)

    both = (fields, vars(fields["text_config"]) if hasattr(fields.get("text_config"), "__dict__") else {})
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if any(_number(part.get(name)) > 1 for part in both for name in experts):
        return "mixture of experts"
    known = _known_to_transformers(config.model_type)
    if known:
        return known
    if has("conv_dim", "num_mel_bins", "feat_extract_norm", "sampling_rate"):
        return "speech"
    if has("image_size", "patch_size", "vision_config"):
        return "vision"
    if has("is_encoder_decoder"):
        return "encoder-decoder"
    heads = " ".join(fields.get("architectures") or [])
    if has("is_decoder", "num_key_value_heads", "rope_parameters") or "CausalLM" in heads or "LMHead" in heads:
        return "decoder"
    return "encoder"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _known_to_transformers(model_type: str) -> ModelKind | None:
    from transformers.models.auto import modeling_auto

    for kind, names in _AUTO:
        if any(model_type in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in names.split()):
            return kind
    return None
