"""The architecture table: one row per family, found by `config.model_type`.

`row.py` documents the fields, `parts.py` has the sublayers. `register` adds a row at run time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shearling.errors import InputError
from shearling.models import parts
from shearling.models.refused import UNSUPPORTED
from shearling.models.row import Row, StackRow

_TARGETS: dict[str, Any] = {"mask": "decoder_attention_mask", "fallback": "attention_mask"}
_ENCODER: dict[str, Any] = {
    "heads": "encoder_attention_heads",
    "groups": "",
    "filters": "encoder_ffn_dim",
    "depth": "encoder_layers",
}
_DECODER = _TARGETS | {
    "heads": "decoder_attention_heads",
    "groups": "",
    "filters": "decoder_ffn_dim",
    "depth": "decoder_layers",
}
# SigLIP's pooling head has one more FFN that reads the same field, so stock shapes keep the width.
_POOLED: dict[str, Any] = {"mask": "", "filters": ""}
_PATCHES: dict[str, Any] = {"mask": "pixel_attention_mask", "filters": ""}
_LLAMA: dict[str, Any] = {"keep_first": 1, "head_size": "head_dim"}
_GPT2: dict[str, Any] = {"keep_first": 1, "filters": "n_inner", "depth": "n_layer"}
_FALCON: dict[str, Any] = {"keep_first": 1, "filters": "ffn_hidden_size"}
_T5: dict[str, Any] = {"keep_first": 1, "first": True, "filters": "d_ff"}
_UMT5: dict[str, Any] = {"keep_first": 1, "filters": "d_ff"}
_SPEECH: dict[str, Any] = {"frames": "_get_feature_vector_attention_mask", "unless": "use_weighted_layer_sum"}
_DINOV2_WIDTHS: dict[str, Any] = {
    "not use_swiglu_ffn": {"filters": "mlp_ratio", "times": "hidden_size"},
    "use_swiglu_ffn": {"filters": ""},
}
_GROUPS = "a head is a whole key-value group with its query heads"


def _decoders(*, pre_norm: bool) -> tuple[StackRow, StackRow]:
    """The decoder of an encoder-decoder, and the same as a decoder-only model without cross-attention."""
    alone = StackRow("decoder.layers", parts.fairseq(pre_norm=pre_norm), keep_first=1, **_DECODER)
    return replace(alone, parts=parts.fairseq(pre_norm=pre_norm, across=True), when="is_encoder_decoder"), alone


def _named(names: str) -> tuple[str, ...]:
    return tuple(names.split())


ROWS: list[Row] = [
    Row(
        _named("bert roberta xlm-roberta camembert electra ernie roformer data2vec-text rembert layoutlm"),
        (StackRow("encoder.layer", parts.BERT_LIKE),),
    ),
    Row(("esm",), (StackRow("encoder.layer", parts.ESM, depth=""),)),
    Row(("roberta-prelayernorm",), (StackRow("encoder.layer", parts.ROBERTA_PRE_LN),)),
    Row(("megatron-bert",), (StackRow("encoder.layer", parts.MEGATRON_BERT),)),
    Row(("xlm-roberta-xl",), (StackRow("encoder.layer", parts.XLM_ROBERTA_XL),)),
    Row(
        ("deberta",),
        (StackRow("encoder.layer", parts.DEBERTA_V1),),
        refuses=(("talking_head", 0, "projections that mix its heads"),),
        half=False,  # masks scores with the least number of the queries' dtype, which is then wider
    ),
    Row(("distilbert",), (StackRow("transformer.layer", parts.DISTILBERT, filters="hidden_dim", depth="n_layers"),)),
    Row(
        ("mobilebert",),
        tuple(StackRow("encoder.layer", parts.mobilebert(ffns)) for ffns in range(8, 0, -1)),
        note="filters of all FFNs in a layer",
    ),
    Row(("mpnet",), (StackRow("encoder.layer", parts.MPNET),)),
    Row(
        ("deberta-v2",),
        (StackRow("encoder.layer", parts.DEBERTA),),
        refuses=(("conv_kernel_size", 0, "a convolution beside the first layer, which the refit cannot follow yet"),),
        note="DeBERTa-v3 too",
    ),
    Row(("modernbert",), (StackRow("layers", parts.MODERNBERT, first=True),)),
    Row(
        ("albert",),
        (StackRow("encoder.albert_layer_groups.0.albert_layers", parts.ALBERT, repeats="num_hidden_layers", depth=""),),
        refuses=(("num_hidden_groups", 1, "several groups of shared layers, of which only one can be cut yet"),),
        note="its layers share weights: one cut for all depths, one head stays",
    ),
    Row(
        ("vit", "deit", "vit_msn", "ijepa", "audio-spectrogram-transformer"),
        (StackRow("layers", parts.vision(), mask=""),),
    ),
    Row(
        ("swin",),
        tuple(StackRow(f"encoder.layers.{stage}.blocks", parts.SWIN, mask="") for stage in range(6)),
        note="every stage is a stack of its own",
        uneven="its configuration gives the width of FFNs as a ratio, for layers of different sizes",
    ),
    Row(("beit",), (StackRow("layers", parts.BEIT, mask=""),)),
    Row(
        ("dinov2", "dinov2_with_registers"),
        tuple(
            StackRow("encoder.layer", found, mask="", when=when, **width)
            for when, width in _DINOV2_WIDTHS.items()
            for found in parts.DINOV2
        ),
        note="stock shapes: FFNs of whole multiples of the hidden size, gated ones keep their width",
    ),
    Row(
        ("dinov3_vit",),
        (StackRow("model.layer", parts.DINOV3, mask=""), StackRow("layer", parts.DINOV3, mask="")),
    ),
    Row(
        ("siglip2",),
        (
            StackRow("text_model.encoder.layers", parts.CLIP, config="text_config"),
            StackRow("vision_model.encoder.layers", parts.CLIP, config="vision_config", **_PATCHES),
        ),
        note="both towers",
    ),
    Row(
        ("siglip2_vision_model",),
        (
            StackRow("encoder.layers", parts.CLIP, **_PATCHES),
            StackRow("vision_model.encoder.layers", parts.CLIP, **_PATCHES),
        ),
    ),
    Row(
        ("clip",),
        (
            StackRow("text_model.encoder.layers", parts.CLIP, config="text_config"),
            StackRow("vision_model.encoder.layers", parts.CLIP, config="vision_config", mask=""),
        ),
        note="both towers",
    ),
    Row(
        ("siglip",),
        (
            StackRow("text_model.encoder.layers", parts.CLIP, config="text_config"),
            StackRow("vision_model.encoder.layers", parts.CLIP, config="vision_config", **_POOLED),
        ),
        note="both towers",
    ),
    Row(
        ("clip_text_model", "siglip_text_model", "siglip2_text_model"),
        (StackRow("encoder.layers", parts.CLIP), StackRow("text_model.encoder.layers", parts.CLIP)),
    ),
    Row(
        ("clip_vision_model",),
        (StackRow("encoder.layers", parts.CLIP, mask=""), StackRow("vision_model.encoder.layers", parts.CLIP, mask="")),
    ),
    Row(
        ("siglip_vision_model",),
        (
            StackRow("encoder.layers", parts.CLIP, **_POOLED),
            StackRow("vision_model.encoder.layers", parts.CLIP, **_POOLED),
        ),
    ),
    Row(
        ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio"),
        (
            StackRow("encoder.layers", parts.SPEECH_PRE_LN, when="do_stable_layer_norm", **_SPEECH),
            StackRow("encoder.layers", parts.SPEECH, **_SPEECH),
        ),
    ),
    Row(
        ("whisper",),
        (
            StackRow("encoder.layers", parts.fairseq(pre_norm=True), mask="", **_ENCODER),
            *_decoders(pre_norm=True),
        ),
    ),
    Row(
        ("mbart", "pegasus", "m2m_100", "blenderbot"),
        (
            StackRow("encoder.layers", parts.fairseq(pre_norm=True), **_ENCODER),
            *_decoders(pre_norm=True),
        ),
    ),
    Row(
        ("bart", "marian", "blenderbot-small", "plbart"),
        (
            StackRow("encoder.layers", parts.fairseq(pre_norm=False), **_ENCODER),
            *_decoders(pre_norm=False),
        ),
    ),
    Row(
        ("t5", "mt5"),
        (
            StackRow("encoder.block", parts.t5(), depth="num_layers", **_T5),
            StackRow("decoder.block", parts.t5(across=True), depth="num_decoder_layers", **_T5, **_TARGETS),
        ),
        note="Flan-T5 too",
    ),
    Row(
        ("umt5",),
        (
            StackRow("encoder.block", parts.umt5(), depth="num_layers", **_UMT5),
            StackRow("decoder.block", parts.umt5(across=True), depth="num_decoder_layers", **_UMT5, **_TARGETS),
        ),
    ),
    Row(("gpt2",), (StackRow("h", parts.GPT2, **_GPT2),)),
    Row(
        ("opt",),
        (
            StackRow(
                "decoder.layers",
                parts.fairseq(pre_norm=True),
                keep_first=1,
                filters="ffn_dim",
                when="do_layer_norm_before",
            ),
            StackRow("decoder.layers", parts.fairseq(pre_norm=False), keep_first=1, filters="ffn_dim"),
        ),
    ),
    Row(
        _named(
            "llama mistral qwen2 qwen3 gemma smollm3 olmo ministral seed_oss ernie4_5 hunyuan_v1_dense arcee nemotron "
            "ministral3 cwm jais2"
        ),
        (StackRow("layers", parts.LLAMA, **_LLAMA),),
        note=_GROUPS,
    ),
    Row(("apertus",), (StackRow("layers", parts.APERTUS, **_LLAMA),), note=_GROUPS),
    Row(("helium", "qwen2_vl_text", "qwen2_5_vl_text"), (StackRow("layers", parts.LLAMA, keep_first=1),), note=_GROUPS),
    Row(("granite",), (StackRow("layers", parts.GRANITE, **_LLAMA),), note=_GROUPS),
    Row(("starcoder2",), (StackRow("layers", parts.STARCODER2, **_LLAMA),), note=_GROUPS),
    Row(("glm",), (StackRow("layers", parts.GLM, **_LLAMA),), note=_GROUPS),
    Row(("glm4",), (StackRow("layers", parts.GLM4, **_LLAMA),), note=_GROUPS),
    Row(("phi3",), (StackRow("layers", parts.PHI3, **_LLAMA),), note=f"Phi-4 too; {_GROUPS}"),
    Row(("gemma2", "gemma3_text"), (StackRow("layers", parts.GEMMA2, **_LLAMA),), note=_GROUPS),
    Row(
        ("gemma3", "llava", "qwen2_vl", "qwen2_5_vl", "paligemma", "mistral3", "internvl"),
        note="the language model, of any family in this list",
        inside=("language_model", "text_config"),
    ),
    Row(
        ("idefics3", "smolvlm"),
        note="the language model, of any family in this list",
        inside=("text_model", "text_config"),
    ),
    Row(("exaone4",), (StackRow("layers", parts.EXAONE4, **_LLAMA),), note=_GROUPS),
    Row(
        ("olmo2", "olmo3"), (StackRow("layers", parts.OLMO2, **_LLAMA),), note="every head stays: one norm is over all"
    ),
    Row(
        ("phi",),
        (StackRow("layers", parts.PHI, **_LLAMA),),
        note=_GROUPS,
    ),
    Row(
        ("gpt_neox",),
        (
            StackRow(
                "layers",
                parts.beside(parts.NEOX, "post_attention_layernorm"),
                keep_first=1,
                when="use_parallel_residual",
            ),
            StackRow("layers", parts.NEOX, keep_first=1),
        ),
        note="Pythia too",
    ),
    Row(
        ("falcon",),
        (
            StackRow("h", parts.FALCON_TWO_NORMS, groups="num_kv_heads", when="new_decoder_architecture", **_FALCON),
            StackRow(
                "h", parts.beside(parts.FALCON), groups="num_kv_heads", when="new_decoder_architecture", **_FALCON
            ),
            StackRow("h", parts.beside(parts.FALCON), groups=1, when="multi_query and parallel_attn", **_FALCON),
            StackRow("h", parts.beside(parts.FALCON), groups="", when="parallel_attn", **_FALCON),
            StackRow("h", parts.FALCON, groups=1, when="multi_query", **_FALCON),
            StackRow("h", parts.FALCON, groups="", **_FALCON),
        ),
        refuses=(("alibi", 0, "an ALiBi bias with a slice for every head, handed on from layer to layer"),),
        note=_GROUPS,
    ),
    Row(
        ("stablelm",),
        (
            StackRow("layers", parts.beside(parts.STABLELM), keep_first=1, when="use_parallel_residual"),
            StackRow("layers", parts.STABLELM, keep_first=1),
        ),
        refuses=(("qk_layernorm", 0, "a norm of its own for every head, which cannot be cut yet"),),
        note=_GROUPS,
    ),
    Row(
        ("cohere", "cohere2"),
        (StackRow("layers", parts.COHERE, **_LLAMA),),
        note=_GROUPS,
    ),
    Row(("gptj",), (StackRow("h", parts.GPTJ, **_GPT2),)),
    Row(("gpt_neo",), (StackRow("h", parts.GPT_NEO, keep_first=1, depth=""),)),
    Row(("eurobert",), (StackRow("layers", parts.LLAMA, head_size="head_dim"),), note=_GROUPS),
    Row(("nomic_bert", "gte"), (StackRow("layers", parts.NOMIC),)),
    Row(("jina_embeddings_v3",), (StackRow("layers", parts.JINA_V3),)),
    Row(("modernbert-decoder",), (StackRow("layers", parts.MODERNBERT_DECODER, keep_first=1, first=True),)),
    Row(
        ("xglm",),
        (StackRow("layers", parts.XGLM, keep_first=1, heads="attention_heads", filters="ffn_dim", depth="num_layers"),),
    ),
    Row(("biogpt",), (StackRow("layers", parts.fairseq(pre_norm=True), keep_first=1),)),
    Row(
        ("gpt_bigcode",),
        (
            StackRow("h", parts.GPT_BIGCODE, groups=1, when="multi_query", **_GPT2),
            StackRow("h", parts.GPT_BIGCODE_MANY, **_GPT2),
        ),
        note="StarCoder 1: one key for all heads, so the attention of a layer is one unit",
    ),
    Row(
        ("moonshine",),
        (
            StackRow(
                "encoder.layers",
                parts.MOONSHINE,
                mask="",
                heads="encoder_num_attention_heads",
                groups="encoder_num_key_value_heads",
                depth="encoder_num_hidden_layers",
            ),
            StackRow(
                "decoder.layers",
                parts.MOONSHINE_DECODER,
                keep_first=1,
                **_TARGETS,
                heads="decoder_num_attention_heads",
                groups="decoder_num_key_value_heads",
                depth="decoder_num_hidden_layers",
            ),
        ),
    ),
]


def register(row: Row) -> None:
    """Add a row at run time; it takes precedence over earlier rows for its `model_type`s."""
    if not row.model_types or not (row.stacks or row.inside) or not all(stack.parts for stack in row.stacks):
        raise InputError("A row needs at least one model_type, one stack, and one part in every stack.")
    ROWS.insert(0, row)


def architectures() -> list[dict[str, object]]:
    """All known architectures as in `shearling architectures --json`: supported ones first, sorted by name."""
    known: dict[str, dict[str, object]] = {}
    for row in ROWS:
        for name in row.model_types:
            kinds = {part.kind for stack in row.stacks for part in stack.parts}
            units = sorted(kinds or {"heads", "filters"}, reverse=True)
            stacks = list(dict.fromkeys(stack.layers for stack in row.stacks)) + list(row.inside or ())[:1]
            known.setdefault(
                name, {"model_type": name, "supported": True, "units": units, "stacks": stacks, "note": row.note}
            )
    for name, refused in UNSUPPORTED.items():
        known.setdefault(
            name, {"model_type": name, "supported": False, "units": [], "stacks": [], "note": refused.reason}
        )
    return sorted(known.values(), key=lambda entry: (not entry["supported"], str(entry["model_type"])))


def describe() -> str:
    """The list as text."""
    entries = architectures()
    wide = max(len(str(entry["model_type"])) for entry in entries)
    lines = []
    for supported, title in ((True, "prunable"), (False, "not supported, and why")):
        lines += ["", f"  {title}", ""]
        for entry in entries:
            if entry["supported"] is supported:
                units = ", ".join(entry["units"])  # type: ignore[arg-type]
                said = ": ".join(part for part in (units, str(entry["note"])) if part)
                lines.append(f"    {entry['model_type']:<{wide}}  {said}")
    lines += ["", "  Not in the list? docs/adding-an-architecture.md adds a row in ten minutes."]
    return "\n".join(lines)
