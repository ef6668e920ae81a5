"""One tiny random model and its batches for every row of the architecture table, and for the variants within a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor

from tiny import batches_of

Inputs = Literal[
    "text", "seq2seq", "image", "both", "patches", "patches-both", "speech", "spectrogram", "whisper", "moonshine"
]

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
    heads: int = 0  # units of attention in a layer, where the names of the configuration's fields do not tell
    filters: int = 0  # the same of all FFNs in a layer


def _towers(kind: str) -> dict[str, Any]:
    return {
        "text_config": TEXT_TOWER | {"model_type": f"{kind}_text_model"},
        "vision_config": VISION | {"model_type": f"{kind}_vision_model", "projection_dim": 16},
        "projection_dim": 16,
    }


def _vision_language(kind: str, language: str, vision: dict[str, Any], **tokens: Any) -> Family:
    """A language model with images, given texts alone."""
    prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "paligemma": "PaliGemma", "internvl": "InternVL",
              "smolvlm": "SmolVLM"}.get(kind, kind.capitalize())  # fmt: skip
    text = LLAMA | {"model_type": language} | (MROPE if "vl" in language else {})
    text |= {"sliding_window": 6} if language == "gemma3_text" else {}
    return Family(kind, f"{prefix}ForConditionalGeneration", {"text_config": text, "vision_config": vision} | tokens)


MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "projection_dim": 32}
CLIP_VISION = VISION | {"model_type": "clip_vision_model"}
QWEN2_VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "intermediate_size": 16}
QWEN2_TOKENS = {
    "image_token_id": 58, "video_token_id": 57, "vision_start_token_id": 56, "vision_end_token_id": 55,
}  # fmt: skip
GEMMA3_TOKENS = {
    "boi_token_index": 57, "eoi_token_index": 58, "image_token_index": 59, "mm_tokens_per_image": 4,
}  # fmt: skip
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
MOBILEBERT = BERT | {
    "intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 3, "embedding_size": 16,
}  # fmt: skip
SWIN = {
    "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "mlp_ratio": 2.0,
}  # fmt: skip
NAFLEX = VISION | {"num_patches": 16}
FAIRSEQ_40 = FAIRSEQ | {"max_position_embeddings": 40}
MOONSHINE = {
    "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "vocab_size": 60,
    "max_position_embeddings": 40, "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
NEOX = BERT | {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
FALCON = NEOX | {"ffn_hidden_size": 48}
GPT_NEO = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "vocab_size": 60,
    "attention_types": [[["global", "local"], 1]], "window_size": 6, "max_position_embeddings": 40,
} | SPECIAL  # fmt: skip
XGLM = {
    "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 60,
    "max_position_embeddings": 40,
} | SPECIAL  # fmt: skip
AST = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "num_mel_bins": 8,
    "max_length": 16, "patch_size": 4, "frequency_stride": 4, "time_stride": 4,
}  # fmt: skip
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
# Relatives: they run the layer code of one of the above, or the same edits.
FAMILIES |= {
    "ernie": Family("ernie", "ErnieForSequenceClassification", BERT),
    "roformer": Family("roformer", "RoFormerForSequenceClassification", BERT | {"embedding_size": 32}, sdpa=False),
    "data2vec-text": Family("data2vec-text", "Data2VecTextForSequenceClassification", BERT),
    "rembert": Family("rembert", "RemBertForSequenceClassification", BERT | {"input_embedding_size": 16}, sdpa=False),
    "esm": Family("esm", "EsmForMaskedLM", BERT | {"pad_token_id": 1, "mask_token_id": 4}),
    "roberta-prelayernorm": Family("roberta-prelayernorm", "RobertaPreLayerNormForSequenceClassification", BERT),
    "xlm-roberta-xl": Family("xlm-roberta-xl", "XLMRobertaXLForSequenceClassification", BERT),
    "megatron-bert": Family("megatron-bert", "MegatronBertForSequenceClassification", BERT, sdpa=False),
    "deberta": Family("deberta", "DebertaForSequenceClassification", DEBERTA, sdpa=False),
    "eurobert": Family("eurobert", "EuroBertForMaskedLM", LLAMA | {"mask_token_id": 4}),
    "nomic_bert": Family("nomic_bert", "NomicBertModel", BERT | {"pad_token_id": 1}),
    "mobilebert": Family("mobilebert", "MobileBertForSequenceClassification", MOBILEBERT, filters=144),
    "swin": Family("swin", "SwinForImageClassification", SWIN, "image"),
    "swin-padded": Family("swin", "SwinModel", SWIN | {"window_size": 3}, "image"),
    "dinov2_with_registers": Family(
        "dinov2_with_registers", "Dinov2WithRegistersModel", VISION | {"mlp_ratio": 2}, "image"
    ),
    "dinov3_vit": Family("dinov3_vit", "DINOv3ViTModel", VISION | {"layerscale_value": 0.5}, "image"),
    "dinov3_vit-gated": Family("dinov3_vit", "DINOv3ViTModel", VISION | {"use_gated_mlp": True}, "image"),
    "siglip2": Family("siglip2", "Siglip2Model", _towers("siglip2"), "patches-both"),
    "siglip2_text_model": Family("siglip2_text_model", "Siglip2TextModel", TEXT_TOWER),
    "siglip2_vision_model": Family("siglip2_vision_model", "Siglip2VisionModel", NAFLEX, "patches"),
    "unispeech": Family("unispeech", "UniSpeechForSequenceClassification", SPEECH, "speech"),
    "unispeech-sat": Family("unispeech-sat", "UniSpeechSatForSequenceClassification", SPEECH, "speech"),
    "moonshine": Family("moonshine", "MoonshineForConditionalGeneration", MOONSHINE, "moonshine"),
    "mbart": Family("mbart", "MBartForConditionalGeneration", FAIRSEQ_40, "seq2seq"),
    "pegasus": Family("pegasus", "PegasusForConditionalGeneration", FAIRSEQ_40, "seq2seq"),
    "m2m_100": Family("m2m_100", "M2M100ForConditionalGeneration", FAIRSEQ_40, "seq2seq"),
    "blenderbot": Family("blenderbot", "BlenderbotForConditionalGeneration", FAIRSEQ_40, "seq2seq"),
    "blenderbot-small": Family("blenderbot-small", "BlenderbotSmallForConditionalGeneration", FAIRSEQ_40, "seq2seq"),
    "marian": Family("marian", "MarianMTModel", FAIRSEQ_40, "seq2seq"),
    "plbart": Family("plbart", "PLBartForConditionalGeneration", FAIRSEQ_40, "seq2seq"),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", LLAMA),
    "olmo": Family("olmo", "OlmoForCausalLM", LLAMA),
    "ministral": Family("ministral", "MinistralForCausalLM", LLAMA),
    "helium": Family("helium", "HeliumForCausalLM", LLAMA),
    "seed_oss": Family("seed_oss", "SeedOssForCausalLM", LLAMA),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM", LLAMA),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", LLAMA),
    "arcee": Family("arcee", "ArceeForCausalLM", LLAMA),
    "nemotron": Family("nemotron", "NemotronForCausalLM", LLAMA),
    "granite": Family("granite", "GraniteForCausalLM", LLAMA | {"residual_multiplier": 0.5}),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", LLAMA),
    "glm": Family("glm", "GlmForCausalLM", LLAMA),
    "glm4": Family("glm4", "Glm4ForCausalLM", LLAMA),
    "phi3": Family("phi3", "Phi3ForCausalLM", LLAMA),
    "phi": Family("phi", "PhiForCausalLM", LLAMA),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", LLAMA | {"sliding_window": 6}, sdpa=False),
    "gemma3_text": Family(
        "gemma3_text", "Gemma3ForCausalLM", LLAMA | {"sliding_window": 6, "sliding_window_pattern": 2}
    ),
    "gemma3": _vision_language("gemma3", "gemma3_text", SIGLIP, **GEMMA3_TOKENS),
    "llava": _vision_language("llava", "llama", CLIP_VISION, image_token_index=59),
    "paligemma": _vision_language("paligemma", "gemma", SIGLIP, image_token_index=59, projection_dim=32),
    "mistral3": _vision_language(
        "mistral3", "ministral3", VISION | {"model_type": "pixtral", "head_dim": 8}, image_token_index=59
    ),
    "internvl": _vision_language(
        "internvl", "qwen2", VISION | {"image_size": [16, 16], "patch_size": [4, 4]}, image_token_id=59
    ),
    "idefics3": _vision_language("idefics3", "llama", VISION, image_token_id=59),
    "smolvlm": _vision_language("smolvlm", "llama", VISION, image_token_id=59),
    "qwen2_vl": _vision_language("qwen2_vl", "qwen2_vl_text", QWEN2_VISION | {"hidden_size": 32}, **QWEN2_TOKENS),
    "qwen2_5_vl": _vision_language(
        "qwen2_5_vl", "qwen2_5_vl_text", QWEN2_VISION | {"hidden_size": 16, "out_hidden_size": 32}, **QWEN2_TOKENS
    ),
    "qwen2_vl_text": Family("qwen2_vl_text", "Qwen2VLTextModel", LLAMA | MROPE),
    "qwen2_5_vl_text": Family("qwen2_5_vl_text", "Qwen2_5_VLTextModel", LLAMA | MROPE),
    "exaone4": Family("exaone4", "Exaone4ForCausalLM", LLAMA | {"sliding_window": 6, "sliding_window_pattern": 2}),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", LLAMA),
    "olmo3": Family("olmo3", "Olmo3ForCausalLM", LLAMA | {"sliding_window": 6}),
    "gpt_neox": Family("gpt_neox", "GPTNeoXForCausalLM", NEOX),
    "gpt_neox-sequential": Family(
        "gpt_neox", "GPTNeoXForSequenceClassification", NEOX | {"use_parallel_residual": False}
    ),
    "falcon-40b": Family("falcon", "FalconForCausalLM", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-7b": Family("falcon", "FalconForCausalLM", FALCON, heads=1),
    "falcon-11b": Family(
        "falcon",
        "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": Family(
        "falcon", "FalconForSequenceClassification", FALCON | {"multi_query": False, "parallel_attn": False}
    ),
    "stablelm": Family("stablelm", "StableLmForCausalLM", LLAMA),
    "stablelm-parallel": Family("stablelm", "StableLmForCausalLM", LLAMA | {"use_parallel_residual": True}),
    "cohere": Family("cohere", "CohereForCausalLM", LLAMA | {"use_qk_norm": True}),
    "cohere2": Family("cohere2", "Cohere2ForCausalLM", LLAMA | {"sliding_window": 6}),
    "gptj": Family("gptj", "GPTJForCausalLM", GPT2 | {"rotary_dim": 4}, sdpa=False),
    "umt5": Family("umt5", "UMT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}, "seq2seq"),
    "layoutlm": Family("layoutlm", "LayoutLMForSequenceClassification", BERT | {"max_2d_position_embeddings": 8}),
    "vit_msn": Family("vit_msn", "ViTMSNForImageClassification", VISION, "image"),
    "ijepa": Family("ijepa", "IJepaModel", VISION, "image"),
    "audio-spectrogram-transformer": Family(
        "audio-spectrogram-transformer", "ASTForAudioClassification", AST, "spectrogram"
    ),
    "data2vec-audio": Family("data2vec-audio", "Data2VecAudioForSequenceClassification", SPEECH, "speech"),
    "ministral3": Family("ministral3", "Ministral3ForCausalLM", LLAMA),
    "cwm": Family("cwm", "CwmForCausalLM", LLAMA),
    "jais2": Family("jais2", "Jais2ForCausalLM", LLAMA),
    "apertus": Family("apertus", "ApertusForCausalLM", LLAMA),
    "gte": Family("gte", "GteModel", BERT | {"pad_token_id": 1}),
    "jina_embeddings_v3": Family("jina_embeddings_v3", "JinaEmbeddingsV3Model", BERT | {"pad_token_id": 1}),
    "modernbert-decoder": Family("modernbert-decoder", "ModernBertDecoderForCausalLM", MODERNBERT),
    "xglm": Family("xglm", "XGLMForCausalLM", XGLM, sdpa=False),
    "biogpt": Family("biogpt", "BioGptForCausalLM", BERT | SPECIAL),
    "gpt_bigcode": Family("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2, heads=1),
    "gpt_bigcode-mha": Family("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2 | {"multi_query": False}),
    "gpt_neo": Family("gpt_neo", "GPTNeoForCausalLM", GPT_NEO, sdpa=False),
}
EVERY = frozenset(family.model_type for family in FAMILIES.values())
# Their rows were written for transformers 5.22, and not tried with an older one, whose modules may have other names.
SINCE_22 = {
    "umt5", "layoutlm", "vit_msn", "ijepa", "audio-spectrogram-transformer", "data2vec-audio", "ministral3", "cwm",
    "jais2", "apertus", "gte", "jina_embeddings_v3", "modernbert-decoder", "xglm", "biogpt", "gpt_bigcode",
    "llava", "paligemma", "mistral3", "internvl", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text",
    "qwen2_5_vl_text",
}  # fmt: skip
_OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22)
FAMILIES = {
    name: family
    for name, family in FAMILIES.items()
    if hasattr(transformers, family.cls) and not (_OLD and family.model_type in SINCE_22)
}
# Their layers run the same edits as another family's of their row; what does not depend on the row is tested there.
RELATIVES = {
    "ernie", "data2vec-text", "rembert", "dinov2_with_registers", "siglip2_text_model", "unispeech", "unispeech-sat",
    "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "plbart", "smollm3", "olmo", "ministral", "helium",
    "seed_oss", "ernie4_5", "hunyuan_v1_dense", "arcee", "nemotron", "olmo3", "cohere2", "falcon-11b", "swin-padded",
    "layoutlm", "vit_msn", "ijepa", "data2vec-audio", "ministral3", "cwm", "jais2", "biogpt",
    "mistral3", "internvl", "idefics3", "smolvlm", "qwen2_vl_text", "qwen2_5_vl_text",
}  # fmt: skip
MAIN = (  # the others run the same modelling code, or the same edits, as one of these
    "bert", "distilbert", "mpnet", "deberta-v3", "modernbert", "albert", "vit", "beit", "dinov2-gated", "clip",
    "wav2vec2", "whisper", "bart", "t5", "gpt2", "opt", "llama", "qwen3",
)  # fmt: skip
DECODERS = (
    "gpt2", "opt", "llama", "mistral", "qwen3", "gemma", "bart", "t5", "whisper", "phi3", "gemma2", "gemma3_text",
    "gpt_neox", "falcon-40b", "falcon-7b", "stablelm-parallel", "gptj", "olmo2", "moonshine", "marian",
)  # fmt: skip


def slow(*values: Any) -> Any:
    """A case for the slow checks, which CI runs too."""
    return pytest.param(*values, marks=pytest.mark.slow)


def relatives_slow(names: Iterable[str]) -> list[Any]:
    """The families as cases of a test; relatives run the modelling code of another one, so with the slow checks."""
    return [slow(name) if name in RELATIVES else name for name in names]


def tiny_model(name: str, *, attention: str | None = None, seed: int = 0) -> Any:
    """A random model with weights large enough for units to matter."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    if attention is not None:
        config._attn_implementation = attention
    model = getattr(transformers, family.cls)._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue  # a fixed table of positions, which is not saved
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
        elif kind == "spectrogram":
            batches.append({"input_values": torch.randn(size, 16, 8, generator=generator)})
        elif kind == "whisper":
            batch = {"input_features": torch.randn(size, 8, 20, generator=generator)}
            batches.append(batch if "encoder" in name else batch | _decoder(size, mask_of(7), generator))
        elif kind == "moonshine":
            batches.append(
                {"input_values": torch.randn(size, 2400, generator=generator)} | _decoder(size, mask_of(7), generator)
            )
        elif kind in ("patches", "patches-both"):
            shapes = torch.tensor([[4, 4], [3, 4], [2, 5], [4, 2]])[torch.arange(size) % 4 if padded else [0] * size]
            patches = {
                "pixel_values": torch.randn(size, 16, 48, generator=generator),
                "pixel_attention_mask": (torch.arange(16) < shapes.prod(1)[:, None]).long(),
                "spatial_shapes": shapes,
            }
            batches.append(text | patches if kind == "patches-both" else patches)
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
