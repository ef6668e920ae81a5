"""The architecture table: one row per family, found by `config.model_type`."""

from __future__ import annotations

from shearling.models.row import Part, Row, StackRow

_BERT_LIKE = (
    Part(
        "heads",
        core="attention.self",
        inputs=("attention.self.query", "attention.self.key", "attention.self.value"),
        out="attention.output.dense",
        returns=2,
        counters=("attention.self.num_attention_heads", "attention.self.all_head_size"),
    ),
    Part("filters", core="intermediate", inputs=("intermediate.dense",), out="output.dense"),
)

_DISTILBERT = (
    Part(
        "heads",
        core="attention",
        inputs=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        returns=2,
        counters=("attention.n_heads",),
    ),
    Part("filters", core="ffn", inputs=("ffn.lin1",), out="ffn.lin2"),
)

ROWS: tuple[Row, ...] = (
    Row(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra"),
        (StackRow("encoder.layer", _BERT_LIKE),),
    ),
    Row(("distilbert",), (StackRow("transformer.layer", _DISTILBERT),)),
)
