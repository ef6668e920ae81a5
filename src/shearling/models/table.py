"""The architecture table: one row per family, found by `config.model_type`.

Rows are data; `row.py` explains the words. `register` adds one at run time.
"""

from __future__ import annotations

from shearling.errors import InputError
from shearling.models.row import Fused, Part, Pick, Positions, Row, StackRow


def _attention(
    core: str, names: str, out: str, *, residual: str = "", counters: tuple[str, ...] = ("num_heads",)
) -> Part:
    """Attention with the output projection inside its core, and three projections into the heads."""
    return Part(
        "heads",
        core=core,
        inputs=tuple(f"{core}.{name}" for name in names.split()),
        out=f"{core}.{out}",
        residual=residual,
        returns=2,
        counters=tuple(f"{core}.{counter}" for counter in counters),
    )


def _mlp(core: str, names: str, out: str, *, residual: str = "") -> Part:
    """An FFN that is a module of its own."""
    inputs = tuple(f"{core}.{name}" for name in names.split())
    return Part("filters", core=core, inputs=inputs, out=f"{core}.{out}", residual=residual)


_QKV = "q_proj k_proj v_proj"
_BERT_HEADS = ("attention.self.num_attention_heads", "attention.self.all_head_size")
_BERT_FFN = Part("filters", core="intermediate", inputs=("intermediate.dense",), out="output.dense")

_BERT_LIKE = (
    Part(
        "heads",
        core="attention.self",
        inputs=("attention.self.query", "attention.self.key", "attention.self.value"),
        out="attention.output.dense",
        returns=2,
        counters=_BERT_HEADS,
    ),
    _BERT_FFN,
)
_DISTILBERT = (
    _attention("attention", "q_lin k_lin v_lin", "out_lin", counters=("n_heads",)),
    _mlp("ffn", "lin1", "lin2"),
)
_MPNET = (
    Part(
        "heads",
        core="attention.attn",
        inputs=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        returns=2,
        counters=("attention.attn.num_attention_heads", "attention.attn.all_head_size"),
        pick=Pick("position_bias"),
    ),
    _BERT_FFN,
)
_DEBERTA = (
    Part(
        "heads",
        core="attention.self",
        inputs=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        out="attention.output.dense",
        returns=2,
        counters=_BERT_HEADS,
        positions=Positions(
            ("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
            span="attention.self.pos_ebd_size",
            kinds="attention.self.pos_att_type",
        ),
    ),
    _BERT_FFN,
)
_MODERNBERT = (
    Part(
        "heads",
        core="attn",
        inputs=(Fused("attn.Wqkv", 3),),
        out="attn.Wo",
        residual="attn_norm",
        returns=2,
    ),
    Part("filters", core="mlp", inputs=(Fused("mlp.Wi", 2),), out="mlp.Wo", residual="mlp_norm"),
)
_ALBERT = (
    Part(
        "heads",
        core="attention",
        inputs=("attention.query", "attention.key", "attention.value"),
        out="attention.dense",
        returns=2,
        counters=("attention.num_attention_heads", "attention.all_head_size"),
        floor=1,  # the core holds the LayerNorm too, which must stay
    ),
    Part("filters", core="ffn", inputs=("ffn",), out="ffn_output"),
)


def _vision(before: str = "layernorm_before", after: str = "layernorm_after") -> tuple[Part, Part]:
    heads = _attention("attention", _QKV, "o_proj", residual=before, counters=("num_attention_heads",))
    return heads, _mlp("mlp", "fc1", "fc2", residual=after)


def _scaled(parts: tuple[Part, Part], *scales: str, pick: Pick | None = None) -> tuple[Part, Part]:
    """The same sublayers with a LayerScale each."""
    from dataclasses import replace

    heads, filters = parts
    return replace(heads, scale=scales[0], pick=pick), replace(filters, scale=scales[1])


_BEIT = _scaled(_vision(), "lambda_1", "lambda_2", pick=Pick("attention_mask"))
_DINOV2_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
_DINOV2_HEADS = _vision("norm1")[0]
_DINOV2_HEADS_OLD = Part(  # transformers before 5.20
    "heads",
    core="attention.attention",
    inputs=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    out="attention.output.dense",
    residual="norm1",
    returns=2,
    counters=("attention.attention.num_attention_heads", "attention.attention.all_head_size"),
)
_DINOV2_FFNS = (
    _mlp("mlp", "fc1", "fc2", residual="norm2"),
    _mlp("mlp", "gate_proj up_proj", "down_proj", residual="norm2"),
    Part("filters", core="mlp", inputs=(Fused("mlp.weights_in", 2),), out="mlp.weights_out", residual="norm2"),
)
_CLIP = (
    _attention("self_attn", _QKV, "out_proj", residual="layer_norm1"),
    _mlp("mlp", "fc1", "fc2", residual="layer_norm2"),
)
_SPEECH = _attention("attention", _QKV, "out_proj")
_SPEECH_FFN = _mlp("feed_forward", "intermediate_dense", "output_dense")
_SPEECH_PRE_LN = (
    _attention("attention", _QKV, "out_proj", residual="layer_norm"),
    _mlp("feed_forward", "intermediate_dense", "output_dense", residual="final_layer_norm"),
)


def _fairseq(*, pre_norm: bool) -> tuple[Part, Part]:
    """The layers of BART, Whisper and OPT, whose FFN has no module of its own."""
    first, second = ("self_attn_layer_norm", "final_layer_norm") if pre_norm else ("", "")
    heads = _attention("self_attn", _QKV, "out_proj", residual=first)
    return heads, Part("filters", core="fc1", inputs=("fc1",), out="fc2", residual=second)


def _t5(ffn: int) -> tuple[Part, Part]:
    core, dense = "layer.0.SelfAttention", f"layer.{ffn}.DenseReluDense"
    return (
        Part(
            "heads",
            core=core,
            inputs=(f"{core}.q", f"{core}.k", f"{core}.v"),
            out=f"{core}.o",
            residual="layer.0.layer_norm",
            returns=3,
            counters=(f"{core}.n_heads", f"{core}.inner_dim"),
            pick=Pick("position_bias", made_by="compute_bias", returned=1),
        ),
        Part(
            "filters",
            core=dense,
            inputs=(f"{dense}.wi", f"{dense}.wi_0", f"{dense}.wi_1"),
            out=f"{dense}.wo",
            residual=f"layer.{ffn}.layer_norm",
        ),
    )


_GPT2 = (
    Part(
        "heads",
        core="attn",
        inputs=(Fused("attn.c_attn", 3),),
        out="attn.c_proj",
        residual="ln_1",
        returns=2,
        counters=("attn.num_heads", "attn.split_size"),
    ),
    _mlp("mlp", "c_fc", "c_proj", residual="ln_2"),
)
_LLAMA = (
    _attention("self_attn", _QKV, "o_proj", residual="input_layernorm", counters=()),
    _mlp("mlp", "gate_proj up_proj", "down_proj", residual="post_attention_layernorm"),
)
_DECODER = {"mask": "decoder_attention_mask", "fallback": "attention_mask", "heads": "decoder_attention_heads"}
_FRAMES = "_get_feature_vector_attention_mask"
_GROUPS = "a head is a whole key-value group with its query heads"

ROWS: list[Row] = [
    Row(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra"),
        (StackRow("encoder.layer", _BERT_LIKE),),
    ),
    Row(("distilbert",), (StackRow("transformer.layer", _DISTILBERT),)),
    Row(("mpnet",), (StackRow("encoder.layer", _MPNET),)),
    Row(
        ("deberta-v2",),
        (StackRow("encoder.layer", _DEBERTA),),
        refuses=(("conv_kernel_size", 0, "a convolution beside the first layer, which the refit cannot follow yet"),),
        note="DeBERTa-v3 too",
    ),
    Row(("modernbert",), (StackRow("layers", _MODERNBERT),)),
    Row(
        ("albert",),
        (StackRow("encoder.albert_layer_groups.0.albert_layers", _ALBERT, repeats="num_hidden_layers"),),
        refuses=(("num_hidden_groups", 1, "several groups of shared layers, of which only one can be cut yet"),),
        note="its layers share weights: one cut for all depths, one head stays",
    ),
    Row(("vit", "deit"), (StackRow("layers", _vision(), mask=""),)),
    Row(("beit",), (StackRow("layers", _BEIT, mask=""),)),
    Row(
        ("dinov2",),
        tuple(
            StackRow("encoder.layer", _scaled((heads, ffn), *_DINOV2_SCALES), mask="")
            for heads in (_DINOV2_HEADS, _DINOV2_HEADS_OLD)
            for ffn in _DINOV2_FFNS
        ),
    ),
    Row(
        ("clip", "siglip"),
        (
            StackRow("text_model.encoder.layers", _CLIP, config="text_config"),
            StackRow("vision_model.encoder.layers", _CLIP, config="vision_config", mask=""),
        ),
        note="both towers",
    ),
    Row(
        ("clip_text_model", "siglip_text_model"),
        (StackRow("encoder.layers", _CLIP), StackRow("text_model.encoder.layers", _CLIP)),
    ),
    Row(
        ("clip_vision_model", "siglip_vision_model"),
        (StackRow("encoder.layers", _CLIP, mask=""), StackRow("vision_model.encoder.layers", _CLIP, mask="")),
    ),
    Row(
        ("wav2vec2", "hubert"),
        (
            StackRow("encoder.layers", _SPEECH_PRE_LN, frames=_FRAMES, when="do_stable_layer_norm"),
            StackRow("encoder.layers", (_SPEECH, _SPEECH_FFN), frames=_FRAMES),
        ),
    ),
    Row(
        ("whisper",),
        (
            StackRow("encoder.layers", _fairseq(pre_norm=True), mask="", heads="encoder_attention_heads"),
            StackRow("decoder.layers", _fairseq(pre_norm=True), keep_first=1, **_DECODER),
        ),
        note="cross-attention is left alone",
    ),
    Row(
        ("bart",),
        (
            StackRow("encoder.layers", _fairseq(pre_norm=False), heads="encoder_attention_heads"),
            StackRow("decoder.layers", _fairseq(pre_norm=False), keep_first=1, **_DECODER),
        ),
        note="cross-attention is left alone",
    ),
    Row(
        ("t5", "mt5"),
        (
            StackRow("encoder.block", _t5(1), keep_first=1),
            StackRow("decoder.block", _t5(2), keep_first=1, mask="decoder_attention_mask", fallback="attention_mask"),
        ),
        note="Flan-T5 too; cross-attention is left alone",
    ),
    Row(("gpt2",), (StackRow("h", _GPT2, keep_first=1),)),
    Row(
        ("opt",),
        (
            StackRow("decoder.layers", _fairseq(pre_norm=True), keep_first=1, when="do_layer_norm_before"),
            StackRow("decoder.layers", _fairseq(pre_norm=False), keep_first=1),
        ),
    ),
    Row(
        ("llama", "mistral", "qwen2", "qwen3", "gemma"),
        (StackRow("layers", _LLAMA, keep_first=1),),
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
