"""Options that several commands share, each in its panel of the help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

if TYPE_CHECKING:
    from shearling.data.images import ImageOptions

INPUT = "Model and data"
CONSTRAINT = "Constraint"
OUTPUT = "Output"
METHOD = "Method"
FORMAT = "Format"
ADVANCED = "Advanced"

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model directory, or an id on the Hub.", show_default=False),
]
Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIRECTORY",
        help="A directory that `shearling prune` wrote.",
        show_default=False,
    ),
]
Data = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this at run time on Python 3.10 too
    typer.Option("--data", help="Examples: jsonl, csv, tsv, parquet or txt, also .gz and .xz.", rich_help_panel=INPUT),
]
Task = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--task",
        help="sst2, mnli, squad, ... or classification, sts, retrieval, rerank, lm, seq2seq, knn, ...",
        rich_help_panel=INPUT,
    ),
]
Limit = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--limit", help="Score on the first N rows only.", min=1, metavar="N", rich_help_panel=INPUT),
]
Metric = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--metric",
        help="Judge by this: ndcg@10, mrr@10, r@1, spearman, auc, rouge-l, agreement, ...; by default the task's own.",
        rich_help_panel=INPUT,
    ),
]
Index = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--index",
        help="retrieval, knn: who embeds what is searched. `dense` is the original; else the model scored.",
        rich_help_panel=INPUT,
    ),
]
Pooling = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--pooling",
        help="Embedding models whose files do not say it: mean, cls, last, max, weighted_mean.",
        rich_help_panel=INPUT,
    ),
]
Prefix = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--prefix",
        help="seq2seq: put this before every source; by default what the configuration says.",
        rich_help_panel=INPUT,
    ),
]
ImageSize = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--image-size", help="Images: pixels of a side, without a processor file.", min=1,
                 rich_help_panel=INPUT),
]  # fmt: skip
Mean = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--mean", help="Images: mean of the colours, one number or three: 0.5 or 0.485,0.456,0.406.",
                 rich_help_panel=INPUT),
]  # fmt: skip
Std = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--std", help="Images: deviation of the colours, as --mean.", rich_help_panel=INPUT),
]
TextColumns = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--text-columns",
        help="The column(s) with the text, comma-separated, if --task does not tell.",
        rich_help_panel=INPUT,
    ),
]
LabelColumn = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--label-column", help="The column with the label.", rich_help_panel=INPUT),
]
MaxLength = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-length", help="Cut texts to this many tokens.", min=2, rich_help_panel=INPUT),
]
Shape = Annotated[
    str,
    typer.Option(
        "--shape",
        help="stock: one width, one number of heads, maybe fewer layers; an ordinary checkpoint that loads anywhere.",
        metavar="uneven|stock",
        rich_help_panel=CONSTRAINT,
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", help="Draws the sample, and labels from the model.", min=0, rich_help_panel=ADVANCED)
]
Samples = Annotated[
    str,
    typer.Option(
        "--samples",
        help="Examples to calibrate on: a number, or auto (2,048, or fewer where that is enough).",
        metavar="auto|N",
        rich_help_panel=INPUT,
    ),
]
FlopsLength = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--flops-length",
        help="Count FLOPs at this many tokens an example; by default the sample's mean.",
        min=1,
        rich_help_panel=ADVANCED,
    ),
]
OldLength = Annotated[Optional[float], typer.Option("--length", hidden=True, min=1)]  # noqa: UP045
BatchSize = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--batch-size",
        help="Examples at a time when scoring; by default what suits the device.",
        min=1,
        rich_help_panel=ADVANCED,
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=ADVANCED)]
Dtype = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--dtype", help="float32, bfloat16, float16; by default the checkpoint's own.", rich_help_panel=ADVANCED
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace --out if it exists.", rich_help_panel=OUTPUT)]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).", rich_help_panel=OUTPUT)
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object on stdout.", rich_help_panel=OUTPUT)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model brings along.", rich_help_panel=ADVANCED)
]


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
