"""The architecture table: one row per family, found by `config.model_type`.

Rows are data; `row.py` explains the words, `parts.py` holds the sublayers. `register` adds a row at run time.
"""

from __future__ import annotations

from shearling.errors import InputError
from shearling.models.parts import (
    ALBERT,
    BEIT,
    BERT_LIKE,
    CLIP,
    DEBERTA,
    DINOV2,
    DISTILBERT,
    GPT2,
    LLAMA,
    MODERNBERT,
    MPNET,
    SPEECH,
    SPEECH_PRE_LN,
    fairseq,
    t5,
    vision,
)
from shearling.models.row import Row, StackRow

_DECODER = {"mask": "decoder_attention_mask", "fallback": "attention_mask", "heads": "decoder_attention_heads"}
_FRAMES = "_get_feature_vector_attention_mask"
_GROUPS = "a head is a whole key-value group with its query heads"

ROWS: list[Row] = [
    Row(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra"),
        (StackRow("encoder.layer", BERT_LIKE),),
    ),
    Row(("distilbert",), (StackRow("transformer.layer", DISTILBERT),)),
    Row(("mpnet",), (StackRow("encoder.layer", MPNET),)),
    Row(
        ("deberta-v2",),
        (StackRow("encoder.layer", DEBERTA),),
        refuses=(("conv_kernel_size", 0, "a convolution beside the first layer, which the refit cannot follow yet"),),
        note="DeBERTa-v3 too",
    ),
    Row(("modernbert",), (StackRow("layers", MODERNBERT),)),
    Row(
        ("albert",),
        (StackRow("encoder.albert_layer_groups.0.albert_layers", ALBERT, repeats="num_hidden_layers"),),
        refuses=(("num_hidden_groups", 1, "several groups of shared layers, of which only one can be cut yet"),),
        note="its layers share weights: one cut for all depths, one head stays",
    ),
    Row(("vit", "deit"), (StackRow("layers", vision(), mask=""),)),
    Row(("beit",), (StackRow("layers", BEIT, mask=""),)),
    Row(
        ("dinov2",),
        tuple(StackRow("encoder.layer", parts, mask="") for parts in DINOV2),
    ),
    Row(
        ("clip", "siglip"),
        (
            StackRow("text_model.encoder.layers", CLIP, config="text_config"),
            StackRow("vision_model.encoder.layers", CLIP, config="vision_config", mask=""),
        ),
        note="both towers",
    ),
    Row(
        ("clip_text_model", "siglip_text_model"),
        (StackRow("encoder.layers", CLIP), StackRow("text_model.encoder.layers", CLIP)),
    ),
    Row(
        ("clip_vision_model", "siglip_vision_model"),
        (StackRow("encoder.layers", CLIP, mask=""), StackRow("vision_model.encoder.layers", CLIP, mask="")),
    ),
    Row(
        ("wav2vec2", "hubert"),
        (
            StackRow("encoder.layers", SPEECH_PRE_LN, frames=_FRAMES, when="do_stable_layer_norm"),
            StackRow("encoder.layers", SPEECH, frames=_FRAMES),
        ),
    ),
    Row(
        ("whisper",),
        (
            StackRow("encoder.layers", fairseq(pre_norm=True), mask="", heads="encoder_attention_heads"),
            StackRow("decoder.layers", fairseq(pre_norm=True), keep_first=1, **_DECODER),
        ),
        note="cross-attention is left alone",
    ),
    Row(
        ("bart",),
        (
            StackRow("encoder.layers", fairseq(pre_norm=False), heads="encoder_attention_heads"),
            StackRow("decoder.layers", fairseq(pre_norm=False), keep_first=1, **_DECODER),
        ),
        note="cross-attention is left alone",
    ),
    Row(
        ("t5", "mt5"),
        (
            StackRow("encoder.block", t5(1), keep_first=1),
            StackRow("decoder.block", t5(2), keep_first=1, mask="decoder_attention_mask", fallback="attention_mask"),
        ),
        note="Flan-T5 too; cross-attention is left alone",
    ),
    Row(("gpt2",), (StackRow("h", GPT2, keep_first=1),)),
    Row(
        ("opt",),
        (
            StackRow("decoder.layers", fairseq(pre_norm=True), keep_first=1, when="do_layer_norm_before"),
            StackRow("decoder.layers", fairseq(pre_norm=False), keep_first=1),
        ),
    ),
    Row(
        ("llama", "mistral", "qwen2", "qwen3", "gemma"),
        (StackRow("layers", LLAMA, keep_first=1),),
        note=_GROUPS,
    ),
]

_BESIDE = "attention and FFN run side by side on one residual, which the refit cannot follow yet"
_AFTER = "a norm stands between the output projections and the residual, which the refit cannot follow yet"
_EXPERTS = "its FFN is a mixture of experts, whose filters are not one projection"
_NO_HEADS = "it has no attention heads of the usual kind"
UNSUPPORTED: dict[str, str] = {
    "bloom": "its ALiBi bias folds heads into the batch, and cannot be picked by head",
    "convbert": "some of its heads are convolutions",
    "deberta": "the first DeBERTa keeps the biases of its heads apart from their projections; v2 and v3 are supported",
    "falcon": _BESIDE,
    "gemma2": _AFTER,
    "gemma3": _AFTER,
    "gemma3_text": _AFTER,
    "gpt_neox": _BESIDE,
    "gptj": _BESIDE,
    "longformer": "its global attention has projections of its own",
    "mamba": _NO_HEADS,
    "mixtral": _EXPERTS,
    "phi": _BESIDE,
    "phi3": "its fused projection holds query and key blocks of different sizes",
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "reformer": _NO_HEADS,
    "swin": "its stages differ in width, and each window has a bias of its own",
    "xlnet": "its projections are three-dimensional tensors, not linear modules",
}


def register(row: Row) -> None:
    """Add a row at run time; it serves its `model_type`s from now on, also where another row did before."""
    if not row.model_types or not row.stacks or not all(stack.parts for stack in row.stacks):
        raise InputError("A row needs at least one model_type, one stack, and one part in every stack.")
    ROWS.insert(0, row)


def architectures() -> list[dict[str, object]]:
    """All that is known, as `shearling architectures --json` lists it: the supported first, each by name."""
    known: dict[str, dict[str, object]] = {}
    for row in ROWS:
        for name in row.model_types:
            units = sorted({part.kind for stack in row.stacks for part in stack.parts}, reverse=True)
            stacks = list(dict.fromkeys(stack.layers for stack in row.stacks))
            known.setdefault(
                name, {"model_type": name, "supported": True, "units": units, "stacks": stacks, "note": row.note}
            )
    for name, reason in UNSUPPORTED.items():
        known.setdefault(name, {"model_type": name, "supported": False, "units": [], "stacks": [], "note": reason})
    return sorted(known.values(), key=lambda entry: (not entry["supported"], str(entry["model_type"])))


def describe() -> str:
    """The list as people read it."""
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
