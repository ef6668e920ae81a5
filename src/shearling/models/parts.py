"""The sublayers of every family, written with the classes of `row.py` and combined into rows in `table.py`."""

from __future__ import annotations

from dataclasses import replace

from shearling.models.row import EVERY, Along, Fused, Part, Pick, Positions


def _attention(
    core: str,
    names: str | Fused,
    out: str,
    *,
    residual: str = "",
    counters: tuple[str, ...] = ("num_heads",),
    returns: int = 2,
    floor: int = 0,
    pick: Pick | None = None,
    positions: Positions | None = None,
) -> Part:
    """Attention; paths of projections and counters are relative to the core.

    out  relative to the core too, unless it contains a dot
    """
    path = out if "." in out else f"{core}.{out}"
    counted = tuple(f"{core}.{counter}" for counter in counters)
    return Part(
        "heads", core, _inside(core, names), path, residual, returns=returns, counters=counted, floor=floor, pick=pick,
        positions=positions,
    )  # fmt: skip


def _mlp(core: str, names: str | Fused, out: str, *, residual: str = "") -> Part:
    """An FFN that is one module."""
    return Part("filters", core, _inside(core, names), f"{core}.{out}", residual)


def _inside(core: str, names: str | Fused) -> tuple[str | Fused, ...]:
    if isinstance(names, Fused):
        return (Fused(f"{core}.{names.path}", names.blocks),)
    return tuple(f"{core}.{name}" for name in names.split())


_QKV = "q_proj k_proj v_proj"
_BERT = "attention.self"
_BERT_OUT = "attention.output.dense"
_BERT_COUNTERS = ("num_attention_heads", "all_head_size")
_BERT_FFN = Part("filters", core="intermediate", inputs=("intermediate.dense",), out="output.dense")

BERT_LIKE = (_attention(_BERT, "query key value", _BERT_OUT, counters=_BERT_COUNTERS), _BERT_FFN)
DISTILBERT = (
    _attention("attention", "q_lin k_lin v_lin", "out_lin", counters=("n_heads",)),
    _mlp("ffn", "lin1", "lin2"),
)
MPNET = (_attention("attention.attn", "q k v", "o", counters=_BERT_COUNTERS, pick=Pick("position_bias")), _BERT_FFN)
DEBERTA = (
    _attention(
        _BERT,
        "query_proj key_proj value_proj",
        _BERT_OUT,
        counters=_BERT_COUNTERS,
        positions=Positions(
            (f"{_BERT}.pos_key_proj", f"{_BERT}.pos_query_proj"),
            span=f"{_BERT}.pos_ebd_size",
            kinds=f"{_BERT}.pos_att_type",
        ),
    ),
    _BERT_FFN,
)
DEBERTA_V1 = (
    replace(
        DEBERTA[0],
        inputs=(f"{_BERT}.in_proj",),  # each head's query, key and value rows are adjacent
        own=(Along(f"{_BERT}.q_bias"), Along(f"{_BERT}.v_bias")),
        positions=Positions(
            (f"{_BERT}.pos_proj", f"{_BERT}.pos_q_proj"),
            span=f"{_BERT}.max_relative_positions",
            kinds=f"{_BERT}.pos_att_type",
            cut=True,
        ),
    ),
    _BERT_FFN,
)
MOBILEBERT_HEADS = replace(BERT_LIKE[0], residual="attention.output", place=1, size=f"{_BERT}.attention_head_size")


def mobilebert(ffns: int) -> tuple[Part, ...]:
    """The layers of MobileBERT: attention and several FFNs on a bottleneck residual."""
    paths = [(f"ffn.{i}.intermediate", f"ffn.{i}.output.dense") for i in range(ffns - 1)]
    more = (Part("filters", core=core, inputs=(f"{core}.dense",), out=out) for core, out in paths)
    return MOBILEBERT_HEADS, *more, _BERT_FFN


ESM = (replace(BERT_LIKE[0], residual="attention.LayerNorm"), replace(_BERT_FFN, residual="LayerNorm"))
ROBERTA_PRE_LN = (ESM[0], _BERT_FFN)  # the norm of its FFN is inside the core
MEGATRON_BERT = (replace(BERT_LIKE[0], residual="attention.ln"), replace(_BERT_FFN, residual="ln"))
XLM_ROBERTA_XL = (
    replace(BERT_LIKE[0], residual="attention.self_attn_layer_norm"),
    replace(_BERT_FFN, residual="LayerNorm"),
)
MODERNBERT = (
    _attention("attn", Fused("Wqkv", 3), "Wo", residual="attn_norm", counters=()),
    _mlp("mlp", Fused("Wi", 2), "Wo", residual="mlp_norm"),
)
MODERNBERT_DECODER = (_attention("attn", _QKV, "Wo", residual="attn_norm", counters=()), MODERNBERT[1])
ALBERT = (
    # The core contains the LayerNorm too, so it must stay.
    _attention("attention", "query key value", "dense", counters=_BERT_COUNTERS, floor=1),
    Part("filters", core="ffn", inputs=("ffn",), out="ffn_output"),
)


def vision(before: str = "layernorm_before", after: str = "layernorm_after") -> tuple[Part, Part]:
    """The layers of ViT and similar models."""
    heads = _attention("attention", _QKV, "o_proj", residual=before, counters=("num_attention_heads",))
    return heads, _mlp("mlp", "fc1", "fc2", residual=after)


def scaled(parts: tuple[Part, Part], *scales: str, pick: Pick | None = None) -> tuple[Part, Part]:
    """The same sublayers, each with a LayerScale."""
    heads, filters = parts
    return replace(heads, scale=scales[0], pick=pick), replace(filters, scale=scales[1])


SWIN = (
    replace(
        vision()[0],
        windows="window_size",
        size="attention.head_dim",
        own=(Along("attention.relative_position_bias.relative_position_bias_table", 1),),
    ),
    vision()[1],
)
BEIT = scaled(vision(), "lambda_1", "lambda_2", pick=Pick("attention_mask"))
_DINOV2_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
_DINOV2_HEADS = vision("norm1")[0]
_DINOV2_HEADS_OLD = _attention(  # transformers before 5.20
    "attention.attention", "query key value", _BERT_OUT, residual="norm1", counters=_BERT_COUNTERS
)
_DINOV2_FFNS = (
    _mlp("mlp", "fc1", "fc2", residual="norm2"),
    _mlp("mlp", "gate_proj up_proj", "down_proj", residual="norm2"),
    _mlp("mlp", Fused("weights_in", 2), "weights_out", residual="norm2"),
)
DINOV2 = tuple(
    scaled((heads, ffn), *_DINOV2_SCALES) for heads in (_DINOV2_HEADS, _DINOV2_HEADS_OLD) for ffn in _DINOV2_FFNS
)
_DINOV3_HEADS = replace(vision("norm1")[0], counters=("attention.num_heads",))
DINOV3 = scaled((_DINOV3_HEADS, _mlp("mlp", "gate_proj up_proj", "down_proj", residual="norm2")), *_DINOV2_SCALES)
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


def fairseq(*, pre_norm: bool, across: bool = False) -> tuple[Part, ...]:
    """The layers of BART, Whisper and OPT, whose FFN is not one module; `across` adds cross-attention."""

    def norm(name: str) -> str:
        return f"{name}_layer_norm" if pre_norm else ""

    heads = _attention("self_attn", _QKV, "out_proj", residual=norm("self_attn"))
    cross = replace(_attention("encoder_attn", _QKV, "out_proj", residual=norm("encoder_attn")), across=True)
    ffn = Part("filters", core="fc1", inputs=("fc1",), out="fc2", residual=norm("final"))
    return (heads, cross, ffn) if across else (heads, ffn)


XGLM = fairseq(pre_norm=True)
XGLM = (replace(XGLM[0], counters=("self_attn.num_heads", "self_attn.embed_dim")), XGLM[1])


def t5(*, across: bool = False) -> tuple[Part, ...]:
    """The layers of T5's encoder, or of its decoder with cross-attention."""
    heads = _t5_heads("layer.0.SelfAttention", Pick("position_bias", made_by="compute_bias", returned=1))
    # The position bias of cross-attention is zero but has a slice per head.
    cross = replace(_t5_heads("layer.1.EncDecAttention", Pick("position_bias", returned=1)), across=True)
    place = f"layer.{2 if across else 1}"
    ffn = _mlp(f"{place}.DenseReluDense", "wi wi_0 wi_1", "wo", residual=f"{place}.layer_norm")
    return (heads, cross, ffn) if across else (heads, ffn)


def _t5_heads(core: str, pick: Pick) -> Part:
    return _attention(
        core,
        "q k v",
        "o",
        residual=f"{core.rpartition('.')[0]}.layer_norm",
        returns=3,
        counters=("n_heads", "inner_dim"),
        pick=pick,
    )


def umt5(*, across: bool = False) -> tuple[Part, ...]:
    """The layers of umT5: as T5's, but each has a position bias of its own."""
    heads, *rest = t5(across=across)
    table = Along("layer.0.SelfAttention.relative_attention_bias.weight", 1)
    return replace(heads, pick=None, returns=2, own=(table,)), *(
        replace(p, pick=None, returns=2) if p.across else p for p in rest
    )


GPT2 = (
    _attention("attn", Fused("c_attn", 3), "c_proj", residual="ln_1", counters=("num_heads", "split_size")),
    _mlp("mlp", "c_fc", "c_proj", residual="ln_2"),
)
_BIGCODE = replace(GPT2[0], inputs=("attn.c_attn",))
GPT_BIGCODE = (replace(_BIGCODE, inputs=(Fused("attn.c_attn", 3),)), GPT2[1])
GPT_BIGCODE_MANY = (_BIGCODE, GPT2[1])  # each head's query, key and value rows are adjacent
LLAMA_HEADS = _attention("self_attn", _QKV, "o_proj", residual="input_layernorm", counters=())
LLAMA = (LLAMA_HEADS, _mlp("mlp", "gate_proj up_proj", "down_proj", residual="post_attention_layernorm"))
GRANITE = tuple(replace(part, scale="residual_multiplier") for part in LLAMA)
STARCODER2 = (LLAMA_HEADS, _mlp("mlp", "c_fc", "c_proj", residual="post_attention_layernorm"))
_GATE_UP = _mlp("mlp", Fused("gate_up_proj", 2), "down_proj", residual="post_attention_layernorm")
GLM = (LLAMA_HEADS, _GATE_UP)
_PHI3_COUNTERS = ("num_key_value_heads", "config.num_attention_heads")
PHI3 = (
    _attention("self_attn", Fused("qkv_proj", 3), "o_proj", residual="input_layernorm", counters=_PHI3_COUNTERS),
    _GATE_UP,
)


def normed(parts: tuple[Part, ...], *norms: str) -> tuple[Part, ...]:
    """The same sublayers with a norm between each output and the residual."""
    return tuple(replace(part, norm=norm) for part, norm in zip(parts, norms, strict=True))


_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA2 = normed((LLAMA_HEADS, replace(LLAMA[1], residual="pre_feedforward_layernorm")), *_NORMS)
GLM4 = normed(GLM, "post_self_attn_layernorm", "post_mlp_layernorm")
EXAONE4 = normed(tuple(replace(part, residual="") for part in LLAMA), *_NORMS)
OLMO2 = (replace(EXAONE4[0], floor=EVERY), EXAONE4[1])  # its query norm spans all heads


def beside(parts: tuple[Part, ...], norm: str = "") -> tuple[Part, ...]:
    """The same sublayers in parallel on one residual; `norm` is the FFN's own input norm, if it is not shared."""
    heads, filters = parts
    return heads, replace(filters, residual=norm or heads.residual, beside=True)


PHI = beside(
    (_attention("self_attn", _QKV, "dense", residual="input_layernorm", counters=()), _mlp("mlp", "fc1", "fc2"))
)
# Each head's query, key and value rows are adjacent in the one projection.
_NEOX_MLP = _mlp("mlp", "dense_h_to_4h", "dense_4h_to_h", residual="post_attention_layernorm")
NEOX = (_attention("attention", "query_key_value", "dense", residual="input_layernorm", counters=()), _NEOX_MLP)
_FALCON_COUNTERS = ("num_heads", "num_kv_heads")
FALCON = (
    _attention("self_attention", "query_key_value", "dense", residual="input_layernorm", counters=_FALCON_COUNTERS),
    _NEOX_MLP,
)
FALCON_TWO_NORMS = beside((replace(FALCON[0], residual="ln_attn"), FALCON[1]), "ln_mlp")
STABLELM = (
    replace(LLAMA_HEADS, counters=("self_attn.num_heads", "self_attn.num_key_value_heads")),
    LLAMA[1],
)
_GPTJ_HEADS = _attention("attn", _QKV, "out_proj", residual="ln_1", counters=("num_attention_heads",))
GPTJ = beside((_GPTJ_HEADS, _mlp("mlp", "fc_in", "fc_out")))
GPT_NEO = (
    _attention("attn.attention", _QKV, "out_proj", residual="ln_1"),
    _mlp("mlp", "c_fc", "c_proj", residual="ln_2"),
)
NOMIC = tuple(replace(part, residual="") for part in LLAMA)
JINA_V3 = (NOMIC[0], _mlp("mlp", "fc1", "fc2"))
APERTUS = (
    replace(LLAMA_HEADS, residual="attention_layernorm"),
    _mlp("mlp", "up_proj", "down_proj", residual="feedforward_layernorm"),
)
MOONSHINE_HEADS = replace(LLAMA_HEADS, counters=("self_attn.config.num_key_value_heads",))
MOONSHINE = (MOONSHINE_HEADS, _mlp("mlp", "fc1", "fc2", residual="post_attention_layernorm"))
MOONSHINE_DECODER = (
    MOONSHINE_HEADS,
    replace(
        _attention("encoder_attn", _QKV, "o_proj", residual="post_attention_layernorm", counters=()),
        counters=("encoder_attn.config.num_key_value_heads",),
        across=True,
    ),
    _mlp("mlp", Fused("fc1", 2), "fc2", residual="final_layernorm"),
)
_COHERE_HEADS = replace(LLAMA_HEADS, own=(Along("self_attn.q_norm.weight"), Along("self_attn.k_norm.weight")))
COHERE = beside((_COHERE_HEADS, LLAMA[1]))
