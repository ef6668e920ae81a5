"""The sublayers of every family, in the words of `row.py`; `table.py` puts them together."""

from __future__ import annotations

from dataclasses import replace

from shearling.models.row import Fused, Part, Pick, Positions


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

BERT_LIKE = (
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
DISTILBERT = (
    _attention("attention", "q_lin k_lin v_lin", "out_lin", counters=("n_heads",)),
    _mlp("ffn", "lin1", "lin2"),
)
MPNET = (
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
DEBERTA = (
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
MODERNBERT = (
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
ALBERT = (
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


def vision(before: str = "layernorm_before", after: str = "layernorm_after") -> tuple[Part, Part]:
    """The layers of ViT and its kin."""
    heads = _attention("attention", _QKV, "o_proj", residual=before, counters=("num_attention_heads",))
    return heads, _mlp("mlp", "fc1", "fc2", residual=after)


def scaled(parts: tuple[Part, Part], *scales: str, pick: Pick | None = None) -> tuple[Part, Part]:
    """The same sublayers with a LayerScale each."""
    heads, filters = parts
    return replace(heads, scale=scales[0], pick=pick), replace(filters, scale=scales[1])


BEIT = scaled(vision(), "lambda_1", "lambda_2", pick=Pick("attention_mask"))
_DINOV2_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
_DINOV2_HEADS = vision("norm1")[0]
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
DINOV2 = tuple(
    scaled((heads, ffn), *_DINOV2_SCALES) for heads in (_DINOV2_HEADS, _DINOV2_HEADS_OLD) for ffn in _DINOV2_FFNS
)
CLIP = (
    _attention("self_attn", _QKV, "out_proj", residual="layer_norm1"),
    _mlp("mlp", "fc1", "fc2", residual="layer_norm2"),
)
SPEECH = (
    _attention("attention", _QKV, "out_proj"),
    _mlp("feed_forward", "intermediate_dense", "output_dense"),
)
SPEECH_PRE_LN = (
    _attention("attention", _QKV, "out_proj", residual="layer_norm"),
    _mlp("feed_forward", "intermediate_dense", "output_dense", residual="final_layer_norm"),
)


def fairseq(*, pre_norm: bool) -> tuple[Part, Part]:
    """The layers of BART, Whisper and OPT, whose FFN has no module of its own."""
    first, second = ("self_attn_layer_norm", "final_layer_norm") if pre_norm else ("", "")
    heads = _attention("self_attn", _QKV, "out_proj", residual=first)
    return heads, Part("filters", core="fc1", inputs=("fc1",), out="fc2", residual=second)


def t5(ffn: int) -> tuple[Part, Part]:
    """The layers of T5; `ffn` is where the FFN stands among a layer's sublayers."""
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


GPT2 = (
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
LLAMA = (
    _attention("self_attn", _QKV, "o_proj", residual="input_layernorm", counters=()),
    _mlp("mlp", "gate_proj up_proj", "down_proj", residual="post_attention_layernorm"),
)
