"""Options that several commands share, each in its panel of the help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from shearling.data.images import ImageOptions

inputs = partial(typer.Option, rich_help_panel="Model and data")
constraint = partial(typer.Option, rich_help_panel="Constraint")
output = partial(typer.Option, rich_help_panel="Output")
method = partial(typer.Option, rich_help_panel="Method")
FORMAT = "Format"
advanced = partial(typer.Option, rich_help_panel="Advanced")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory, or an id on the Hub.", show_default=False)
]
Directory = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="A directory that `shearling prune` wrote.", show_default=False)
]
Data = Annotated[str | None, inputs("--data", help="Examples: jsonl, csv, tsv, parquet or txt, also .gz and .xz.")]
Task = Annotated[
    str | None,
    inputs("--task", help="sst2, mnli, squad, ... or classification, sts, retrieval, rerank, lm, seq2seq, knn, ..."),
]
Limit = Annotated[int | None, inputs("--limit", help="Score on the first N rows only.", min=1, metavar="N")]
Metric = Annotated[
    str | None,
    inputs(
        "--metric",
        help="Judge by this: ndcg@10, mrr@10, r@1, spearman, auc, rouge-l, agreement, ...; by default the task's own.",
    ),
]
Index = Annotated[
    str | None,
    inputs(
        "--index", help="retrieval, knn: who embeds what is searched. `dense` is the original; else the model scored."
    ),
]
Pooling = Annotated[
    str | None,
    inputs("--pooling", help="Embedding models whose files do not say it: mean, cls, last, max, weighted_mean."),
]
Prefix = Annotated[
    str | None,
    inputs("--prefix", help="seq2seq: put this before every source; by default what the configuration says."),
]
ImageSize = Annotated[
    int | None,
    inputs("--image-size", help="Images: pixels of a side, without a processor file.", min=1)
]  # fmt: skip
Mean = Annotated[
    str | None,
    inputs("--mean", help="Images: mean of the colours, one number or three: 0.5 or 0.485,0.456,0.406.")
]  # fmt: skip
Std = Annotated[str | None, inputs("--std", help="Images: deviation of the colours, as --mean.")]
TextColumns = Annotated[
    str | None, inputs("--text-columns", help="The column(s) with the text, comma-separated, if --task does not tell.")
]
LabelColumn = Annotated[str | None, inputs("--label-column", help="The column with the label.")]
MaxLength = Annotated[int | None, inputs("--max-length", help="Cut texts to this many tokens.", min=2)]
Shape = Annotated[
    str,
    constraint(
        "--shape",
        help="stock: one width, one number of heads, maybe fewer layers; an ordinary checkpoint that loads anywhere.",
        metavar="uneven|stock",
    ),
]
Seed = Annotated[int, advanced("--seed", help="Draws the sample, and labels from the model.", min=0)]
Samples = Annotated[
    str,
    inputs(
        "--samples",
        help="Examples to calibrate on: a number, or auto (2,048, or fewer where that is enough; 8,192 texts for an "
        "embedding model on a GPU).",
        metavar="auto|N",
    ),
]
FlopsLength = Annotated[
    float | None,
    advanced("--flops-length", help="Count FLOPs at this many tokens an example; by default the sample's mean.", min=1),
]
OldLength = Annotated[float | None, typer.Option("--length", hidden=True, min=1)]
BatchSize = Annotated[
    int | None,
    advanced("--batch-size", help="Examples at a time when scoring; by default what suits the device.", min=1),
]
Device = Annotated[str, advanced("--device", help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str | None, advanced("--dtype", help="float32, bfloat16, float16; by default the checkpoint's own.")]
Force = Annotated[bool, output("--force", help="Replace --out if it exists.")]
Quiet = Annotated[bool, output("--quiet", "-q", help="Print nothing but errors (and --json).")]
Json = Annotated[bool, output("--json", help="Print the result as one JSON object on stdout.")]
TrustRemoteCode = Annotated[bool, advanced("--trust-remote-code", help="Run code that the model brings along.")]


def columns(value: str | None) -> list[str] | None:
    """`a,b` as a list."""
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


def images(size: int | None, mean: str | None, std: str | None) -> ImageOptions | None:
    """The options about images, where any was given."""
    if size is None and mean is None and std is None:
        return None
    from shearling.data.images import ImageOptions

    return ImageOptions(size, _numbers(mean, "--mean"), _numbers(std, "--std"))


def _numbers(value: str | None, option: str) -> list[float] | None:
    try:
        return None if value is None else [float(part) for part in value.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a number, or three with commas", param_hint=option) from None


def samples(value: str) -> int | Literal["auto"]:
    """`auto`, or a number of examples."""
    if value == "auto":
        return "auto"
    if not value.isdecimal() or int(value) < 1:
        raise typer.BadParameter(f"{value!r} is neither auto nor a number of examples", param_hint="--samples")
    return int(value)


def polish(value: str) -> int | str:
    """A number of passes, or the words as they are."""
    return int(value) if value.isdecimal() else value


def renamed(old: str, new: str, given: float | None, value: float | None) -> float | None:
    """The value of an option that had another name; the old name works, with a warning."""
    if given is None:
        return value
    from shearling.cli.console import warn

    warn(f"{old} is now called {new}; the old name will go in the next version")
    return given if value is None else value


def examples(*commands: str) -> str:
    """The end of a command's help: commands to copy."""
    return "\n\n".join(["[bold]Examples[/]", *(f"  [dim]$[/] {command}" for command in commands)])
