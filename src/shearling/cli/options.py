"""Options shared by several commands, each with its panel of the help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from shearling.workflows.source import Source

inputs = partial(typer.Option, rich_help_panel="Model and data")
constraint = partial(typer.Option, rich_help_panel="Constraint")
output = partial(typer.Option, rich_help_panel="Output")
method = partial(typer.Option, rich_help_panel="Method")
FORMAT = "Format"
advanced = partial(typer.Option, rich_help_panel="Advanced")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, or a Hub id.", show_default=False)]
Directory = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="A directory that `shearling prune` wrote.", show_default=False)
]
Data = Annotated[str | None, inputs("--data", help="Examples: jsonl, csv, tsv, parquet or txt, also .gz and .xz.")]
Task = Annotated[
    str | None,
    inputs("--task", help="sst2, mnli, squad, ... or classification, sts, retrieval, rerank, lm, seq2seq, knn, ..."),
]
Limit = Annotated[int | None, inputs("--limit", help="Score only the first N rows.", min=1, metavar="N")]
TextColumns = Annotated[
    str | None, inputs("--text-columns", help="Text column(s), comma-separated, if the task's defaults do not match.")
]
LabelColumn = Annotated[str | None, inputs("--label-column", help="Label column, if the task's defaults do not match.")]
MaxLength = Annotated[int | None, inputs("--max-length", help="Truncate texts to this many tokens.", min=2)]
Shape = Annotated[
    str,
    constraint(
        "--shape",
        help="stock: one width, one number of heads, maybe fewer layers; an ordinary checkpoint that loads anywhere.",
        metavar="uneven|stock",
    ),
]
Seed = Annotated[int, advanced("--seed", help="Seed of the sample, and of labels sampled from the model.", min=0)]
Samples = Annotated[
    str,
    inputs(
        "--samples",
        help="Number of calibration examples, or auto (2,048, or fewer if that is enough; 8,192 for an embedding model "
        "on a GPU).",
        metavar="auto|N",
    ),
]
FlopsLength = Annotated[
    float | None,
    advanced("--flops-length", help="Tokens per example for counting FLOPs; default: the sample's mean.", min=1),
]
OldLength = Annotated[float | None, typer.Option("--length", hidden=True, min=1)]
BatchSize = Annotated[
    int | None,
    advanced("--batch-size", help="Batch size for scoring; default: suited to the device.", min=1),
]
Device = Annotated[str, advanced("--device", help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str | None, advanced("--dtype", help="float32, bfloat16, float16; default: the checkpoint's own.")]
Force = Annotated[bool, output("--force", help="Replace --out if it exists.")]
Quiet = Annotated[bool, output("--quiet", "-q", help="Print nothing but errors (and --json).")]
Json = Annotated[bool, output("--json", help="Print the result as one JSON object on stdout.")]
TrustRemoteCode = Annotated[bool, advanced("--trust-remote-code", help="Run custom code of the model.")]


@dataclass(frozen=True)
class DataOptions:
    """The data options of `prune`, `sweep`, `evaluate` and `compare`."""

    data: Data = None
    task: Task = None
    text_columns: TextColumns = None
    label_column: LabelColumn = None
    max_length: MaxLength = None
    limit: Limit = None
    metric: Annotated[
        str | None,
        inputs(help="Metric: ndcg@10, mrr@10, r@1, spearman, auc, rouge-l, agreement, ...; default: the task's own."),
    ] = None
    index: Annotated[
        str | None,
        inputs(
            help="retrieval, knn: model that embeds the passages: `dense`, or a directory; default: the scored model."
        ),
    ] = None
    pooling: Annotated[
        str | None,
        inputs(help="Pooling, if the model's files do not have it: mean, cls, last, max, weighted_mean."),
    ] = None
    prefix: Annotated[
        str | None,
        inputs(help="seq2seq: prefix of every source; default: that of the configuration."),
    ] = None
    image_size: Annotated[int | None, inputs(help="Images: pixels per side, without a processor file.", min=1)] = None
    mean: Annotated[
        str | None, inputs(help="Images: mean of the channels, one number or three: 0.5 or 0.485,0.456,0.406.")
    ] = None
    std: Annotated[str | None, inputs(help="Images: standard deviation of the channels, as --mean.")] = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False

    def source(self, model: str, **more: Any) -> Source:
        """The source; `more` are fields that only some commands have options for."""
        from shearling.data.images import ImageOptions
        from shearling.workflows.source import Source

        pictures = (self.image_size, _numbers(self.mean, "--mean"), _numbers(self.std, "--std"))
        return Source(
            model, self.data, self.task, text_columns=columns(self.text_columns), label_column=self.label_column,
            max_length=self.max_length, metric=self.metric, index=self.index, pooling=self.pooling,
            prefix=self.prefix, device=self.device,
            images=ImageOptions(*pictures) if any(one is not None for one in pictures) else None,
            trust_remote_code=self.trust_remote_code, **more,
        )  # fmt: skip


def reads(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `reading` by the options of `DataOptions`."""
    defaults = {one.name: one.default for one in fields(DataOptions)}
    values: dict[str, Any] = {}  # defaults of the options, in the order of the help
    for name, parameter in inspect.signature(command).parameters.items():
        values |= defaults if name == "reading" else {name: parameter.default}
    for name in ("device", "trust_remote_code"):  # panels are ordered by their first option: "Advanced" comes last
        values[name] = values.pop(name)

    @wraps(command)
    def with_options(**given: Any) -> None:
        command(reading=DataOptions(**{name: given.pop(name) for name in defaults}), **given)

    hints = get_type_hints(command, include_extras=True) | get_type_hints(DataOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter(name, keyword, default=values[name], annotation=hints[name]) for name in values]
    with_options.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    with_options.__annotations__ = {name: hints[name] for name in values}
    return with_options


def columns(value: str | None) -> list[str] | None:
    """`a,b` as a list."""
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


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
    """A number of passes, or the text itself."""
    return int(value) if value.isdecimal() else value


def renamed(old: str, new: str, given: float | None, value: float | None) -> float | None:
    """The value of a renamed option; the old name works with a warning."""
    if given is None:
        return value
    from shearling.cli.console import warn

    warn(f"{old} is now called {new}; the old name will go in the next version")
    return given if value is None else value


def examples(*commands: str) -> str:
    """The examples at the end of a command's help."""
    return "\n\n".join(["[bold]Examples[/]", *(f"  [dim]$[/] {command}" for command in commands)])
