"""One tiny random model and its batches for every row of the architecture table, and for the variants within a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from tiny import batches_of

Inputs = Literal["text", "seq2seq", "image", "both", "speech", "whisper"]

BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60,
    "max_position_embeddings": 40,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
LLAMA = BERT | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
TEXT_TOWER = BERT | {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "projection_dim": 16}
SPEECH = BERT | {
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "feat_extract_norm": "layer",
}  # fmt: skip
FAIRSEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "vocab_size": 60, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 60,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
}  # fmt: skip
SPECIAL = {
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model class, a small configuration for it, and what it takes in."""

    model_type: str
    cls: str
    config: Mapping[str, Any]
    inputs: Inputs = "text"
    sdpa: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)


def _towers(kind: str) -> dict[str, Any]:
    return {
        "text_config": TEXT_TOWER | {"model_type": f"{kind}_text_model"},
        "vision_config": VISION | {"model_type": f"{kind}_vision_model", "projection_dim": 16},
        "projection_dim": 16,
    }


ELECTRA = BERT | {"embedding_size": 32}
DISTILBERT = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60, "max_position_embeddings": 40,
}  # fmt: skip
DEBERTA = BERT | {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "max_relative_positions": 16,
    "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
MODERNBERT = BERT | SPECIAL | {"global_attn_every_n_layers": 2, "local_attention": 6}
ALBERT = BERT | {"embedding_size": 16, "num_hidden_layers": 3}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "vocab_size": 60, "n_positions": 40} | SPECIAL
OPT = BERT | SPECIAL | {"ffn_dim": 48, "word_embed_proj_dim": 32}
WHISPER = FAIRSEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40}
BEIT = VISION | {"use_relative_position_bias": True, "layer_scale_init_value": 0.5}

FAMILIES: dict[str, Family] = {
    "bert": Family("bert", "BertForSequenceClassification", BERT),
    "roberta": Family("roberta", "RobertaForSequenceClassification", BERT),
    "xlm-roberta": Family("xlm-roberta", "XLMRobertaForTokenClassification", BERT),
    "camembert": Family("camembert", "CamembertForQuestionAnswering", BERT),
    "electra": Family("electra", "ElectraForSequenceClassification", ELECTRA),
    "distilbert": Family("distilbert", "DistilBertForMaskedLM", DISTILBERT),
    "mpnet": Family("mpnet", "MPNetModel", BERT, sdpa=False),
    "deberta-v2": Family("deberta-v2", "DebertaV2ForSequenceClassification", DEBERTA, sdpa=False),
    "deberta-v3": Family("deberta-v2", "DebertaV2Model", DEBERTA | {"share_att_key": True}, sdpa=False),
    "modernbert": Family("modernbert", "ModernBertForSequenceClassification", MODERNBERT),
    "albert": Family("albert", "AlbertForSequenceClassification", ALBERT),
    "vit": Family("vit", "ViTForImageClassification", VISION, "image"),
    "deit": Family("deit", "DeiTForImageClassification", VISION, "image"),
    "beit": Family("beit", "BeitForImageClassification", BEIT, "image"),
    "beit-shared": Family(
        "beit",
        "BeitModel",
        VISION | {"use_shared_relative_position_bias": True, "layer_scale_init_value": 0.0},
        "image",
    ),
    "dinov2": Family("dinov2", "Dinov2ForImageClassification", VISION | {"mlp_ratio": 2}, "image"),
    "dinov2-gated": Family("dinov2", "Dinov2Model", VISION | {"mlp_ratio": 2, "use_swiglu_ffn": True}, "image"),
    "clip": Family("clip", "CLIPModel", _towers("clip"), "both"),
    "clip_text_model": Family("clip_text_model", "CLIPTextModelWithProjection", TEXT_TOWER),
    "clip_vision_model": Family("clip_vision_model", "CLIPVisionModelWithProjection", VISION, "image"),
    "siglip": Family("siglip", "SiglipModel", _towers("siglip"), "both"),
    "siglip_text_model": Family("siglip_text_model", "SiglipTextModel", TEXT_TOWER),
    "siglip_vision_model": Family("siglip_vision_model", "SiglipVisionModel", VISION, "image"),
    "wav2vec2": Family("wav2vec2", "Wav2Vec2ForSequenceClassification", SPEECH, "speech"),
    "wav2vec2-stable": Family("wav2vec2", "Wav2Vec2ForCTC", SPEECH | {"do_stable_layer_norm": True}, "speech"),
    "hubert": Family("hubert", "HubertForSequenceClassification", SPEECH, "speech"),
    "whisper": Family("whisper", "WhisperForConditionalGeneration", WHISPER, "whisper"),
    "whisper-encoder": Family("whisper", "WhisperForAudioClassification", WHISPER, "whisper"),
    "bart": Family("bart", "BartForConditionalGeneration", FAIRSEQ | {"max_position_embeddings": 40}, "seq2seq"),
    "bart-classifier": Family("bart", "BartForSequenceClassification", FAIRSEQ | {"max_position_embeddings": 40}),
    "t5": Family("t5", "T5ForConditionalGeneration", T5, "seq2seq"),
    "flan-t5": Family("t5", "T5Model", T5 | {"feed_forward_proj": "gated-gelu"}, "seq2seq"),
    "mt5": Family("mt5", "MT5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", GPT2),
    "opt": Family("opt", "OPTForCausalLM", OPT),
    "opt-350m": Family("opt", "OPTForSequenceClassification", OPT | {"do_layer_norm_before": False}),
    "llama": Family("llama", "LlamaForCausalLM", LLAMA),
    "mistral": Family("mistral", "MistralForCausalLM", LLAMA | {"sliding_window": 6}),
    "qwen2": Family("qwen2", "Qwen2ForSequenceClassification", LLAMA),
    "qwen3": Family(
        "qwen3", "Qwen3ForCausalLM", LLAMA | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", LLAMA),
}
DECODERS = ("gpt2", "opt", "llama", "mistral", "qwen3", "gemma", "bart", "t5", "whisper")


def tiny_model(name: str, *, attention: str | None = None, seed: int = 0) -> Any:
    """A random model with weights large enough for units to matter."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    config = transformers.AutoConfig.for_model(family.model_type, **family.config, **family.changes)
    if attention is not None:
        config._attn_implementation = attention
    model = getattr(transformers, family.cls)._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4).add_(torch.randn_like(parameter) * 0.05)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_batches(
    name: str, count: int = 3, size: int = 4, *, padded: bool = True, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Random batches without labels; `padded` makes the examples differ in length."""
    generator = torch.Generator().manual_seed(seed)

    def images() -> Tensor:
        return torch.randn(size, 3, 16, 16, generator=generator)

    def mask_of(length: int) -> Tensor:
        lengths = torch.randint(length // 2, length + 1, (size,), generator=generator)
        lengths[0] = length
        return (
            (torch.arange(length) < lengths[:, None]).long() if padded else torch.ones(size, length, dtype=torch.long)
        )

    kind = FAMILIES[name].inputs
    batches: list[dict[str, Tensor]] = []
    for text in batches_of(count, size, labels="", seed=seed):
        if not padded:
            text = {"input_ids": text["input_ids"].clamp_min(5), "attention_mask": torch.ones_like(text["input_ids"])}
        text["input_ids"][:, 2] = 3  # one end-of-text token in every example, where some pool
        if kind == "image":
            batches.append({"pixel_values": images()})
        elif kind == "both":
            batches.append(text | {"pixel_values": images()})
        elif kind == "speech":
            mask = mask_of(80)
            batches.append({"input_values": torch.randn(size, 80, generator=generator) * mask, "attention_mask": mask})
        elif kind == "whisper":
            batch = {"input_features": torch.randn(size, 8, 20, generator=generator)}
            batches.append(batch if "encoder" in name else batch | _decoder(size, mask_of(7), generator))
        elif kind == "seq2seq":
            batches.append(text | _decoder(size, mask_of(7), generator))
        else:
            batches.append(text)
    return batches


def _decoder(size: int, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(5, 60, (size, mask.shape[1]), generator=generator)
    return {"decoder_input_ids": ids * mask + (1 - mask), "decoder_attention_mask": mask}


def outputs_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What the model is for, as one matrix."""
    with torch.no_grad():
        outputs = model(**batch)
    names = ("logits", "start_logits", "end_logits", "text_embeds", "image_embeds", "last_hidden_state")
    return torch.cat([outputs[n].flatten(1).float() for n in names if isinstance(outputs.get(n), Tensor)], 1)
