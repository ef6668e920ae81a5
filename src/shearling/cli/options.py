"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory, or an id on the Hub.", show_default=False)
]
Directory = Annotated[
    Path,
    typer.Argument(metavar="DIRECTORY", help="A directory that `shearling prune` wrote.", show_default=False),
]
Data = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this at run time on Python 3.10 too
    typer.Option("--data", help="Examples: jsonl, csv, tsv, parquet or txt, also .gz and .xz."),
]
Task = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--task", help="sst2, mnli, squad, ... or classification, sts, retrieval, rerank, lm, ..."),
]
Metric = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--metric", help="Judge by this: ndcg@10, mrr@10, r@1, r@10, spearman, auc, ...; the task's usual."),
]
Index = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--index", help="retrieval: who embeds the passages. `dense` is the original; else the model scored."),
]
Pooling = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--pooling", help="Embedding models whose files do not say: mean, cls, last, max, weighted_mean."),
]
TextColumns = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--text-columns", help="The column(s) with the text, comma-separated, if --task does not tell."),
]
LabelColumn = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--label-column", help="The column with the label."),
]
Seed = Annotated[int, typer.Option("--seed", help="Draws the sample, and labels from the model.", min=0)]
Samples = Annotated[int, typer.Option("--samples", help="Examples to calibrate on.", min=1)]
MaxLength = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-length", help="Cut texts to this many tokens.", min=2),
]
Length = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--length", help="Tokens of an example, for counting FLOPs; the sample's mean unless given.", min=1),
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Examples per batch.", min=1)]
AutoBatchSize = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--batch-size", help="Examples per batch; what suits the device, unless given.", min=1),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--dtype", help="float32, bfloat16, float16; the checkpoint's own unless given."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace --out if it exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no words.")]
Json = Annotated[bool, typer.Option("--json", help="Exactly one JSON object on stdout.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model brings along; off unless asked for.")
]


def columns(value: str | None) -> list[str] | None:
    """`a,b` as a list."""
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]
