"""The sublayers of every family, in the words of `row.py`; `table.py` puts them together."""

from __future__ import annotations

from dataclasses import replace

from shearling.models.row import EVERY, Along, Fused, Part, Pick, Positions


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
_DEBERTA_V1 = "attention.self"
DEBERTA_V1 = (
    replace(
        DEBERTA[0],
        inputs=(f"{_DEBERTA_V1}.in_proj",),  # a head's rows lie together: query, key and value
        own=(Along(f"{_DEBERTA_V1}.q_bias"), Along(f"{_DEBERTA_V1}.v_bias")),
        positions=Positions(
            (f"{_DEBERTA_V1}.pos_proj", f"{_DEBERTA_V1}.pos_q_proj"),
            span=f"{_DEBERTA_V1}.max_relative_positions",
            kinds=f"{_DEBERTA_V1}.pos_att_type",
            cut=True,
        ),
    ),
    _BERT_FFN,
)
MOBILEBERT_HEADS = replace(
    BERT_LIKE[0], residual="attention.output", place=1, size="attention.self.attention_head_size"
)


def mobilebert(ffns: int) -> tuple[Part, ...]:
    """The layers of MobileBERT: attention and several FFNs, on a residual that is theirs alone."""
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
    """The layers of BART, Whisper and OPT, whose FFN has no module of its own; a decoder's may attend across."""

    def norm(name: str) -> str:
        return f"{name}_layer_norm" if pre_norm else ""

    heads = _attention("self_attn", _QKV, "out_proj", residual=norm("self_attn"))
    cross = replace(_attention("encoder_attn", _QKV, "out_proj", residual=norm("encoder_attn")), across=True)
    ffn = Part("filters", core="fc1", inputs=("fc1",), out="fc2", residual=norm("final"))
    return (heads, cross, ffn) if across else (heads, ffn)


def t5(*, across: bool = False) -> tuple[Part, ...]:
    """The layers of T5's encoder, or those of its decoder, which also attend across."""
    heads = _t5_heads("layer.0.SelfAttention", Pick("position_bias", made_by="compute_bias", returned=1))
    # The bias of cross-attention is all zeros, but has a slice for every head.
    cross = replace(_t5_heads("layer.1.EncDecAttention", Pick("position_bias", returned=1)), across=True)
    place = f"layer.{2 if across else 1}"
    dense = f"{place}.DenseReluDense"
    ffn = Part(
        "filters",
        core=dense,
        inputs=(f"{dense}.wi", f"{dense}.wi_0", f"{dense}.wi_1"),
        out=f"{dense}.wo",
        residual=f"{place}.layer_norm",
    )
    return (heads, cross, ffn) if across else (heads, ffn)


def _t5_heads(core: str, pick: Pick) -> Part:
    return Part(
        "heads",
        core=core,
        inputs=(f"{core}.q", f"{core}.k", f"{core}.v"),
        out=f"{core}.o",
        residual=f"{core.rpartition('.')[0]}.layer_norm",
        returns=3,
        counters=(f"{core}.n_heads", f"{core}.inner_dim"),
        pick=pick,
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
LLAMA_HEADS = _attention("self_attn", _QKV, "o_proj", residual="input_layernorm", counters=())
LLAMA = (LLAMA_HEADS, _mlp("mlp", "gate_proj up_proj", "down_proj", residual="post_attention_layernorm"))
GRANITE = tuple(replace(part, scale="residual_multiplier") for part in LLAMA)
STARCODER2 = (LLAMA_HEADS, _mlp("mlp", "c_fc", "c_proj", residual="post_attention_layernorm"))
_GATE_UP = Part(
    "filters",
    core="mlp",
    inputs=(Fused("mlp.gate_up_proj", 2),),
    out="mlp.down_proj",
    residual="post_attention_layernorm",
)
GLM = (LLAMA_HEADS, _GATE_UP)
PHI3 = (
    Part(
        "heads",
        core="self_attn",
        inputs=(Fused("self_attn.qkv_proj", 3),),
        out="self_attn.o_proj",
        residual="input_layernorm",
        returns=2,
        counters=("self_attn.num_key_value_heads", "self_attn.config.num_attention_heads"),
    ),
    _GATE_UP,
)


def normed(parts: tuple[Part, ...], *norms: str) -> tuple[Part, ...]:
    """The same sublayers with a norm between each output and the residual."""
    return tuple(replace(part, norm=norm) for part, norm in zip(parts, norms, strict=True))


_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA2 = normed((LLAMA_HEADS, replace(LLAMA[1], residual="pre_feedforward_layernorm")), *_NORMS)
GLM4 = normed(GLM, "post_self_attn_layernorm", "post_mlp_layernorm")
EXAONE4 = normed(tuple(replace(part, residual="") for part in LLAMA), *_NORMS)
OLMO2 = (replace(EXAONE4[0], floor=EVERY), EXAONE4[1])  # a norm over the queries of all heads ties them together


def beside(parts: tuple[Part, ...], norm: str = "") -> tuple[Part, ...]:
    """The same sublayers side by side on one residual; `norm` names the one before the FFN, if it is not shared."""
    heads, filters = parts
    return heads, replace(filters, residual=norm or heads.residual, beside=True)


PHI = beside(
    (_attention("self_attn", _QKV, "dense", residual="input_layernorm", counters=()), _mlp("mlp", "fc1", "fc2"))
)
# A head's rows of the one projection lie together: query, key and value.
_NEOX_MLP = _mlp("mlp", "dense_h_to_4h", "dense_4h_to_h", residual="post_attention_layernorm")
NEOX = (_attention("attention", "query_key_value", "dense", residual="input_layernorm", counters=()), _NEOX_MLP)
FALCON = (
    _attention(
        "self_attention",
        "query_key_value",
        "dense",
        residual="input_layernorm",
        counters=("num_heads", "num_kv_heads"),
    ),
    _NEOX_MLP,
)
FALCON_TWO_NORMS = beside((replace(FALCON[0], residual="ln_attn"), FALCON[1]), "ln_mlp")
STABLELM = (
    replace(LLAMA_HEADS, counters=("self_attn.num_heads", "self_attn.num_key_value_heads")),
    LLAMA[1],
)
GPTJ = beside(
    (
        _attention("attn", _QKV, "out_proj", residual="ln_1", counters=("num_attention_heads",)),
        _mlp("mlp", "fc_in", "fc_out"),
    )
)
GPT_NEO = (
    Part(
        "heads",
        core="attn.attention",
        inputs=tuple(f"attn.attention.{name}" for name in _QKV.split()),
        out="attn.attention.out_proj",
        residual="ln_1",
        returns=2,
        counters=("attn.attention.num_heads",),
    ),
    _mlp("mlp", "c_fc", "c_proj", residual="ln_2"),
)
NOMIC = tuple(replace(part, residual="") for part in LLAMA)
MOONSHINE_HEADS = replace(LLAMA_HEADS, counters=("self_attn.config.num_key_value_heads",))
MOONSHINE = (MOONSHINE_HEADS, _mlp("mlp", "fc1", "fc2", residual="post_attention_layernorm"))
MOONSHINE_DECODER = (
    MOONSHINE_HEADS,
    replace(
        _attention("encoder_attn", _QKV, "o_proj", residual="post_attention_layernorm", counters=()),
        counters=("encoder_attn.config.num_key_value_heads",),
        across=True,
    ),
    Part("filters", core="mlp", inputs=(Fused("mlp.fc1", 2),), out="mlp.fc2", residual="final_layernorm"),
)
COHERE = beside(
    (
        replace(LLAMA_HEADS, own=(Along("self_attn.q_norm.weight"), Along("self_attn.k_norm.weight"))),
        LLAMA[1],
    )
)
