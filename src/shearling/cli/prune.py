"""`shearling prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling prune my-model --data texts.jsonl --flops 0.5 -o my-model-50",
    "shearling prune my-model --data train.jsonl --eval dev.jsonl --flops 0.3 -o small --report small.html",
    "shearling prune my-model --data train.jsonl --eval dev.jsonl --max-drop 1 -o small",
)


@o.reads
def prune(
    model: o.Model,
    reading: o.DataOptions,
    evaluation: Annotated[str | None, o.inputs("--eval", help="Labelled rows for scoring dense and pruned.")] = None,
    samples: o.Samples = "auto",
    flops: Annotated[float | None, o.constraint(help="Keep this share of the layers' FLOPs, in (0, 1].")] = None,
    params: Annotated[float | None, o.constraint(help="Keep this share of the layers' parameters.")] = None,
    latency: Annotated[float | None, o.constraint(help="Take this share of the model's time.")] = None,
    table: Annotated[
        Path | None,
        o.constraint(help="With --latency: a table from `shearling profile`; default: the model is profiled first."),
    ] = None,
    batch_size: Annotated[int | None, o.constraint(help="Batch size of the latency; default: 1.", min=1)] = None,
    seq_len: Annotated[
        int | None, o.constraint(help="Tokens per example of the latency; default: the sample's mean.", min=1)
    ] = None,
    max_drop: Annotated[
        float | None, o.constraint(help="Find the smallest budget that loses at most this many points on --eval.")
    ] = None,
    by: Annotated[str, o.constraint(help="With --max-drop: kind of budget: flops, params or latency.")] = "flops",
    shape: o.Shape = "uneven",
    out: Annotated[Path | None, o.output("--out", "-o", help="Output directory for the pruned model.")] = None,
    report: Annotated[Path | None, o.output(help="Write the report as an HTML page to this file.")] = None,
    force: Annotated[bool, o.output("--force", help="Replace --out and --report if they exist.")] = False,
    dry_run: Annotated[bool, o.output("--dry-run", help="Show the result and its cost; write nothing.")] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    method: Annotated[str, o.method(help="Pruning method: surgeon or paper.")] = "surgeon",
    settings: Annotated[
        list[str] | None,
        o.method(
            "--set",
            help="A setting of the method, such as damp=0.02; may be given several times.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    multiple_of: Annotated[
        int | None,
        o.method(help="Round filter counts to multiples of this; default: the method's own.", min=1),
    ] = None,
    labels: Annotated[bool, o.method("--labels", help="surgeon: use the data's labels.")] = False,
    refit: Annotated[bool, o.method("--refit/--no-refit", help="surgeon: refit the output projections.")] = True,
    realign: Annotated[
        bool, o.method("--realign/--no-realign", help="surgeon: correct the inputs of the units.")
    ] = True,
    polish: Annotated[
        str | None,
        o.method(
            help="Distil the result from MODEL: auto, off, a number of passes, or seconds (30s); surgeon: auto.",
            metavar="auto|off|PASSES|SECONDSs",
        ),
    ] = None,
    importance: Annotated[str, o.method(help="paper: fisher, magnitude, gradient or random.")] = "fisher",
    allocation: Annotated[str, o.method(help="paper: searched or uniform.")] = "searched",
    rearrange: Annotated[bool, o.method("--rearrange/--no-rearrange", help="paper: rearrange the masks.")] = True,
    tune: Annotated[bool, o.method("--tune/--no-tune", help="paper: tune the masks.")] = True,
    drop_sublayers: Annotated[
        bool,
        o.method(
            "--drop-sublayers/--no-drop-sublayers",
            help="paper: drop whole sublayers if their overheads alone exceed the latency.",
        ),
    ] = True,
    correct: Annotated[
        bool, o.advanced("--correct/--no-correct", help="Choose again if the model is slower than the table predicts.")
    ] = True,
    timing: Annotated[bool, o.advanced("--timing/--no-timing", help="With --eval: time both models.")] = True,
    seed: o.Seed = 0,
    flops_length: o.FlopsLength = None,
    length: o.OldLength = None,
    dtype: o.Dtype = None,
) -> None:
    """Prune MODEL to a constraint, without retraining, and write a smaller model directory."""
    from shearling.cli.console import emit, print_facts, say, warn
    from shearling.files import check_file
    from shearling.methods.ranges import checked_shape
    from shearling.report.facts import facts_of
    from shearling.target import Target
    from shearling.workflows.max_drop import describe_drop, drop_of
    from shearling.workflows.method import method_from
    from shearling.workflows.progress import stages_of, watching
    from shearling.workflows.pruning import prune_source, write_report

    if out is None and not dry_run:
        raise typer.BadParameter("say where to write the pruned model, or use --dry-run", param_hint="--out")
    if report is not None:
        check_file(report, force=force)
    if (batch_size is not None or seq_len is not None) and latency is None and evaluation is None:
        warn("--batch-size and --seq-len only affect a latency and timing, not the sample")
    source = reading.source(
        model, samples=o.samples(samples), seed=seed, dtype=dtype,
        length=o.renamed("--length", "--flops-length", length, flops_length),
    )  # fmt: skip
    flags = {
        "labels": labels, "refit": refit, "realign": realign, "importance": importance, "allocation": allocation,
        "rearrange": rearrange, "tune": tune, "drop_sublayers": drop_sublayers,
        **({} if polish is None else {"polish": o.polish(polish)}),
    }  # fmt: skip
    chosen = method_from(method, flags, settings or ())
    target = Target(flops, params, multiple_of, latency, table, correct, batch_size, seq_len, checked_shape(shape))
    expected = stages_of(chosen, scored=evaluation is not None, drop=max_drop is not None)
    with watching(not quiet, expected) as watcher:
        pruned = prune_source(
            source,
            target,
            chosen,
            out=None if dry_run else out,
            evaluation=evaluation,
            limit=reading.limit,
            drop=drop_of(max_drop, by),
            timing=timing,
            force=force,
            watcher=watcher,
        )
    changed = {} if pruned.flipped is None else {"flipped": pruned.flipped}
    record = pruned.report.to_json() | changed | {"out": None if dry_run else str(out)}
    if report is not None:
        write_report(record, source, target, report, force=force)
        say(f"report written to {report}", quiet=quiet)
    if as_json:
        emit(record)
        return
    print_facts(facts_of(record | {"base": model}), quiet=quiet)
    if "max_drop" in record:
        say(f"\n{describe_drop(record['max_drop'])}", quiet=quiet)
    say("not written (--dry-run)" if dry_run else f"written to {out}", quiet=quiet)
