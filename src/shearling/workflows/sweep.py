"""`shearling.sweep`: prune to many budgets; writes results.json, curve.svg and report.html."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling._version import versions
from shearling.checkpoint.record import add_curve
from shearling.costs import weight_bytes
from shearling.engine.distributed import on_first
from shearling.engine.precision import dtype_name
from shearling.engine.progress import Watcher
from shearling.evaluation.exam import Evaluation, Exam
from shearling.files import RECORD
from shearling.latency.table import Table
from shearling.latency.timing import device_name
from shearling.methods import Method, method_of, settings_of
from shearling.methods.ranges import Samples, Shape
from shearling.models.digest import weights_digest_of
from shearling.models.structure import Structure, structure_of
from shearling.report.points import name_of
from shearling.sample.read import sample_of
from shearling.workflows.arguments import model_in
from shearling.workflows.grid import Grid, budgets_of, outcomes
from shearling.workflows.progress import READING, ProgressLike, quiet, watching
from shearling.workflows.pruning import changes, timed
from shearling.workflows.source import Loaded, Source, companions_of, data_name, exam_of, open_source
from shearling.workflows.sweep_folder import CURVE, MODELS, PAGE, RESULTS, Store, write_all

if TYPE_CHECKING:
    from shearling.workflows.arguments import Data


STAGES = READING | {"sweep": 90.0}


def sweep(
    model: Any,
    data: Data | None = None,
    *,
    out: str | os.PathLike[str],
    eval: Any = None,  # noqa: A002 - the option's name
    flops: Sequence[float] | None = None,
    params: Sequence[float] | None = None,
    latency: Sequence[float] | None = None,
    table: str | os.PathLike[str] | None = None,
    methods: Sequence[str | Method] = ("surgeon",),
    seeds: Sequence[int] = (0,),
    save: bool = False,
    timing: bool = True,
    limit: int | None = None,
    multiple_of: int | None = None,
    shape: Shape = "uneven",
    tokenizer: Any = None,
    samples: Samples = "auto",
    task: str | None = None,
    metric: str | None = None,
    index: str | None = None,
    pooling: str | None = None,
    prefix: str | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    max_length: int | None = None,
    flops_length: float | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: ProgressLike = True,
) -> dict[str, Any]:
    """Prune to many budgets by several methods, score every model, and draw the curve; returns the `--json` record.

    out         directory for results.json, curve.svg and report.html; an interrupted sweep is resumed
    eval        labelled rows for scoring every model: a file name, a data set, a list of dicts
    flops, params, latency  the budgets, of one kind: flops=(0.7, 0.5, 0.3)
    table       with latency: a table from `shearling profile`
    methods     names, or configured methods (one per name)
    seeds       each draws its own sample
    save        keep the pruned models under out/models
    timing      time every model against the dense one
    limit       score only the first `limit` rows
    batch_size  for scoring; default: suited to the device
    force       discard the sweep in `out` and start afresh

    The others are those of `shearling.prune`.
    """
    given = {"flops": flops, "params": params, "latency": latency}
    chosen = [method_of(method) for method in methods]
    grid = Grid(
        {method.name: method for method in chosen},
        budgets_of({kind: values for kind, values in given.items() if values is not None}),
        tuple(seeds),
        multiple_of,
        None if table is None else Path(table),
        shape,
    )
    source = Source(
        model_in(model), data, task, text_columns=text_columns, label_column=label_column, max_length=max_length,
        batch_size=batch_size, samples=samples, seed=grid.seeds[0], device=device, dtype=dtype,
        trust_remote_code=trust_remote_code, length=flops_length, metric=metric, index=index, pooling=pooling,
        tokenizer=tokenizer, prefix=prefix,
    )  # fmt: skip
    with watching(progress, STAGES) as watcher:
        return sweep_source(
            source, grid, Path(out), evaluation=eval, limit=limit, save=save, timing=timing, force=force,
            watcher=watcher,
        )  # fmt: skip


def sweep_source(
    source: Source,
    grid: Grid,
    out: Path,
    *,
    evaluation: Any = None,
    limit: int | None = None,
    save: bool = False,
    timing: bool = True,
    force: bool = False,
    dry_run: bool = False,
    watcher: Watcher = quiet,
) -> dict[str, Any]:
    """Run the grid and write `out`, resuming an interrupted sweep; returns the `--json` record.

    dry_run  check model and data, and return the plan without measuring or writing anything
    """
    methods = list(grid.methods.values())
    loaded = open_source(source, evaluation, methods=methods, watcher=watcher)
    structure = structure_of(loaded.model)
    for method in methods:
        grid.targets[0].check_fits(structure, method)  # all targets share table and shape
    exam = exam_of(source, loaded, evaluation, limit=limit, dense=loaded.model)
    if dry_run:
        return _planned(grid, loaded, exam)
    store = Store(out, sweep_settings(source, grid, loaded, exam), force=force)
    here = {"device": device_name(loaded.model.device), "batch_size": source.examples_per_batch}
    store.facts["environment"] = here | versions()
    done = store.done(saved=save)
    unfinished = any(point not in done for point in grid.points())
    dense = exam.take(loaded.model, progress=partial(watcher, "evaluate")) if unfinished else None
    if store.facts["dense"] is None and dense is not None:
        store.facts["dense"] = _dense_facts(dense, structure, grid.targets[0].times)
        store.write()
    skipped = []
    for outcome in outcomes(source, loaded, exam, grid, done=done, watcher=watcher):
        pruned = outcome.pruned
        if pruned is None:
            skipped.append({"method": outcome.method, "constraint": dict(outcome.constraint), "why": outcome.problem})
            continue
        if dense is not None and outcome.score is not None:
            pruned = replace(pruned, flipped=changes(exam, dense, outcome.score))
            pruned = timed(pruned, loaded.model) if timing else pruned
            outcome = replace(outcome, pruned=pruned)
        store.add(outcome)
        if save:
            place = out / MODELS / name_of(outcome.method, outcome.constraint, outcome.seed)
            pruned.save(place, source=companions_of(source, loaded), force=True)
            store.add(outcome, saved=place)
    return _finish(store, skipped, source)


def _planned(grid: Grid, loaded: Loaded, exam: Exam) -> dict[str, Any]:
    """The record of `--dry-run`."""
    points = [{"method": method, "constraint": dict(asked), "seed": seed} for method, asked, seed in grid.points()]
    return {
        "dry_run": True,
        "task": loaded.task.name,
        "points": points,
        "measurements": len(grid.methods) * len(grid.seeds),
        "samples": sample_of(loaded.examples).examples,
        "evaluations": len(points) + 1,
        "examples": len(exam.rows),
    }


def _dense_facts(score: Evaluation, structure: Structure, times: Table | None) -> dict[str, Any]:
    """The dense model's score, sizes and, with a latency table, the time per layer."""
    return {
        **score.to_json(), "seconds": score.seconds, "layers": structure.sizes,
        "architecture": type(structure.model).__name__, "megabytes": weight_bytes(structure.model) / 1e6,
        **({} if times is None else {"layer_time": times.layer_shares(structure)}),
    }  # fmt: skip


def describe_planned(record: dict[str, Any]) -> str:
    """The record of `--dry-run` as text."""
    lines = [
        f"{record['task']}: {record['measurements']} measurements of {record['samples']:,} examples, then "
        f"{len(record['points'])} models to prune and {record['evaluations']} to score on {record['examples']:,}"
    ]
    for point in record["points"]:
        asked = ", ".join(f"{kind} {ratio:g}" for kind, ratio in point["constraint"].items())
        lines.append(f"  {point['method']:<10}{asked:<16}seed {point['seed']}")
    return "\n".join([*lines, "nothing was written (--dry-run)"])


def _finish(store: Store, skipped: list[dict[str, Any]], source: Source) -> dict[str, Any]:
    """Write chart and page, and return the summary."""
    from shearling.report.page import sweep_page
    from shearling.report.points import curve_chart

    out, dense = store.folder, store.facts["dense"]
    files = {"results": str(out / RESULTS)}
    if store.results:
        title = f"{Path(source.name).name}: {dense['task']}"
        curve = curve_chart(store.results, dense=dense, title=title)
        write_all({out / CURVE: curve, out / PAGE: sweep_page(store.results, store.facts, title=title)})
        on_first(lambda: _draw_curves(store, title))
        files |= {"curve": str(out / CURVE), "report": str(out / PAGE)}
    return {"out": str(out), "dense": dense, "results": store.results, "skipped": skipped, "files": files}


def _draw_curves(store: Store, title: str) -> None:
    """Add the chart to the card of every saved model, with the model marked."""
    from shearling.report.points import curve_chart

    for row in store.results:
        place = store.folder / row.get("model", "")
        if "model" in row and (place / RECORD).is_file():
            add_curve(place, curve_chart(store.results, dense=store.facts["dense"], title=title, this=row))


def sweep_settings(source: Source, grid: Grid, loaded: Loaded, exam: Exam) -> dict[str, Any]:
    """Everything that a point depends on besides method, budget and seed."""
    given = {"metric": source.metric, "index": source.index, "pooling": source.pooling, "prefix": source.prefix}
    given["shape"] = None if grid.shape == "uneven" else grid.shape  # absent in sweeps of version 0.1
    return {name: value for name, value in given.items() if value is not None} | {
        "model": source.name,
        "weights": weights_digest_of(loaded.model),
        "task": loaded.task.name,
        "data": data_name(source),
        "data_digest": loaded.rows.fingerprint() if loaded.rows else sample_of(loaded.examples).fingerprint,
        "eval_digest": exam.rows.fingerprint(),
        "eval_rows": len(exam.rows),
        "samples": source.samples,
        "max_length": source.max_length,
        "length": source.length,
        "columns": [source.text_columns, source.label_column],
        "dtype": dtype_name(loaded.model.dtype),
        "multiple_of": grid.multiple_of,
        "table": None if grid.table is None else hashlib.sha256(Path(grid.table).read_bytes()).hexdigest(),
        "methods": {name: settings_of(method) for name, method in grid.methods.items()},
    }


def describe_sweep(record: dict[str, Any]) -> str:
    """The result of a sweep as text."""
    dense = record["dense"]
    lines = [f"{dense['task']}: dense {dense['metric']} {dense['value']:.2f} on {dense['examples']:,} examples", ""]
    lines.append(f"  {'method':<10}{'asked':<16}{'seed':>4}{dense['metric']:>12}{'change':>9}{'seconds':>9}")
    for row in record["results"]:
        asked = ", ".join(f"{kind} {ratio:g}" for kind, ratio in row["constraint"].items())
        numbers = f"{row['value']:>12.2f}{row['value'] - dense['value']:>+9.2f}{row['seconds']:>9.2f}"
        lines.append(f"  {row['method']:<10}{asked:<16}{row['seed']:>4}{numbers}")
    lines += [f"  skipped: {one['method']}: {one['why']}" for one in record["skipped"]]
    return "\n".join([*lines, "", *(f"  {name}: {path}" for name, path in record["files"].items())])
