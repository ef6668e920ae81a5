"""How much faster pruned models run: dense against pruned, batch by batch, under several runtimes.

    python benchmarks/latency.py --models MODELS --data DATA --tasks sst2,stsb     # at most 1 point lost, on the CPU
    python benchmarks/latency.py --device cuda --dtype bfloat16 --shapes bert-base  # random weights: times only
    python benchmarks/latency.py --device cuda --dtype bfloat16 --shapes bert-base --predict --table graphs

With MODELS (one fine-tuned model a task, `minilm-l6-TASK`) and DATA (TASK.train.*, TASK.dev.*), each batch size gets a
latency table of its own, and ratios are tried from the mildest on until more than --loss points are lost; the last one
within is reported: the paper's table of speed-ups. With random weights of given shapes nothing can be scored, and each
of --ratios is reported. --predict holds the table's predictions against measured times, without corrections.

Dense and pruned take turns in the same run, under each runtime: PyTorch as it is, recorded as a CUDA graph,
torch.compile (also in its mode reduce-overhead, which records graphs too), and ONNX Runtime on the CPU where it is
installed. The tables are measured under the runtime --table. Results go to OUT/latency-NAME.json and .md.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, random_batches, random_model

import shearling
from shearling.engine.hooks import device_of, frozen
from shearling.engine.precision import DTYPES
from shearling.latency.inputs import example_inputs
from shearling.latency.timing import check_runtime, in_turns, runner
from shearling.schema import RUNTIMES as TABLES

Run = Callable[[], object]


def eager(model: Any, inputs: dict[str, torch.Tensor], folder: Path) -> Run:
    return partial(model, **inputs)


def compiled(model: Any, inputs: dict[str, torch.Tensor], folder: Path) -> Run:
    torch._dynamo.reset()
    return partial(torch.compile(model, dynamic=False), **inputs)


def graphs(model: Any, inputs: dict[str, torch.Tensor], folder: Path) -> Run:
    check_runtime("graphs", device_of(model))
    return runner(model, inputs, "graphs")


def reduce_overhead(model: Any, inputs: dict[str, torch.Tensor], folder: Path) -> Run:
    check_runtime("graphs", device_of(model))
    torch._dynamo.reset()
    return partial(torch.compile(model, dynamic=False, mode="reduce-overhead"), **inputs)


def onnx(model: Any, inputs: dict[str, torch.Tensor], folder: Path) -> Run:
    from shearling.exporters.formats import Job
    from shearling.exporters.graph import reference
    from shearling.exporters.table import find_format

    kind = find_format("onnx")
    if device_of(model).type != "cpu" or model.dtype != torch.float32:
        raise RuntimeError("ONNX Runtime is timed on the CPU in float32 only")
    path = folder / f"{id(model)}.onnx"
    small = {k: torch.cat([v[:1], v[:1]]) for k, v in inputs.items()}  # a batch of 1 would be taken for a fixed size
    kind.write(Job(copy.deepcopy(model), small, list(reference(model, [small])[0]), path))
    return partial(kind.open_runner(path), inputs)


RUNTIMES = {"eager": eager, "graphs": graphs, "compile": compiled, "reduce-overhead": reduce_overhead, "onnx": onnx}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Give up after a while: compilers can take long."""

    def ring(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def compare(dense: Any, pruned: Any, table: shearling.Table, runtimes: list[str], patience: int) -> dict[str, Any]:
    """Milliseconds of both under each runtime, or why there are none."""
    dtype = DTYPES[table.dtype]
    models = [copy.deepcopy(m).to(dtype) for m in (dense, pruned)]
    inputs = example_inputs(models[0], table.batch_size, table.seq_len)
    found: dict[str, Any] = {}
    for name in runtimes:
        with tempfile.TemporaryDirectory() as folder, frozen(models[0]), frozen(models[1]):
            try:
                with at_most(patience), torch.inference_mode(name != "onnx"):
                    runs = [RUNTIMES[name](m, inputs, Path(folder)) for m in models]
                    times = in_turns(runs, device_of(models[0]))
            except Exception as error:
                found[name] = {"none": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
                continue
        full, less = (t.median for t in times)
        found[name] = {"dense_ms": 1e3 * full, "pruned_ms": 1e3 * less, "speedup": full / less}
    return found


def profiled(model: Any, args: argparse.Namespace, batch: int) -> shearling.Table:
    """A table at one batch size, in the dtype asked for."""
    dtype = DTYPES[args.dtype]
    timed = model if model.dtype == dtype else copy.deepcopy(model).to(dtype)
    return shearling.profile(timed, batch_size=batch, seq_len=args.seq_len, runtime=args.table, seconds=args.budget)


def row_of(batch: int, pruned: shearling.Pruned, dense: Any, table: shearling.Table, args: argparse.Namespace) -> Any:
    latency = pruned.report.to_json()["latency"]
    runtimes = [] if args.predict else args.runtimes.split(",")
    return {
        "batch": batch,
        "ratio": latency["ratio"],
        "predicted": latency["predicted"],
        "measured": latency["measured"],
        "corrections": latency["corrections"],
        "flops": pruned.report.flops.ratio,
        "layers": pruned.report.layers,
        "runtimes": compare(dense, pruned.model, table, runtimes, args.patience),
    }


def with_random_weights(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = random_model(args.shapes).to(args.device)
    batches = random_batches(args.samples, args.seq_len, 32)
    plan = shearling.measure(model, batches, method=shearling.Surgeon(refit=False))
    for batch in args.batches:
        table = profiled(model, args, batch)
        for ratio in args.ratios:
            try:
                pruned = plan.prune(latency=ratio, table=table, correct=not args.predict)
            except shearling.ConstraintError as error:
                yield {"batch": batch, "ratio": ratio, "none": str(error)}
                continue
            yield {"task": args.shapes, **row_of(batch, pruned, model, table, args)}


def at_matched_accuracy(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for task in args.tasks.split(","):
        loaded, plan, score = _task(args, task)
        dense = score(loaded.model)
        for batch in args.batches:
            table = profiled(loaded.model, args, batch)
            best: Any = None
            why = f"every ratio lost more than {args.loss}"
            for ratio in sorted(args.ratios, reverse=True):
                try:
                    pruned = plan.prune(latency=ratio, table=table, correct=not args.predict)
                except shearling.ConstraintError as error:
                    why = str(error)
                    break
                value = score(pruned.model)
                if dense - value > args.loss:
                    break
                best = {"task": task, "dense": dense, "value": value}, pruned
            if best is None:
                yield {"task": task, "batch": batch, "dense": dense, "none": why}
            else:
                yield {**best[0], **row_of(batch, best[1], loaded.model, table, args)}


def _task(args: argparse.Namespace, task: str) -> tuple[Any, shearling.Plan, Callable[[Any], float]]:
    from shearling.data import read_rows
    from shearling.evaluation.exam import make_exam
    from shearling.methods import Surgeon
    from shearling.pipeline import measure
    from shearling.workflows.source import Source, open_source

    def file(part: str) -> str:
        return str(next(iter(sorted(args.data.glob(f"{task}.{part}.*")))))

    model = str(args.models / f"minilm-l6-{task}")
    source = Source(model, file("train"), task, samples=args.samples, device=args.device)
    loaded = open_source(source, methods=[Surgeon()])
    plan = measure(
        loaded.model, loaded.examples, samples=source.samples, seed=source.seed, length=source.length, method=Surgeon()
    )
    exam = make_exam(loaded.model, loaded.tokenizer, read_rows(file("dev")), task)
    return loaded, plan, lambda m: float(exam.take(m, device=args.device).value)


def markdown(rows: list[dict[str, Any]], record: dict[str, Any]) -> str:
    """A table people read; a runtime without a number says why below it."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("runtimes", {})))
    lines = [
        f"{record['device']}, length {record['seq_len']}, {record['dtype']}, tables {record['table']}; "
        f"`{record['command']}`",
        "",
        f"| model | batch | ratio asked | predicted | measured | metric | {' | '.join(names) or 'FLOPs'} |",
        "|---|---|---|---|---|---|" + "---|" * max(len(names), 1),
    ]
    notes = []
    for row in rows:
        if "none" in row:
            notes.append(f"* batch {row['batch']}: {row['none']}")
            continue
        cells = []
        for name in names:
            found = row["runtimes"].get(name, {})
            cells.append(_speedup(found, on_gpu=record["device"].startswith("NVIDIA")))
            if "none" in found:
                notes.append(f"* {name}, batch {row['batch']}: {found['none']}")
        metric = f"{row['dense']:.1f} -> {row['value']:.1f}" if "value" in row else "-"
        last = " | ".join(cells) or f"{row['flops']:.1%}"
        lines.append(
            f"| {row['task']} | {row['batch']} | {row['ratio']:g} | {row['predicted']:.3f} | {row['measured']:.3f} "
            f"| {metric} | {last} |"
        )
    return "\n".join([*lines, "", *dict.fromkeys(notes)]).rstrip() + "\n"


def _speedup(found: dict[str, Any], *, on_gpu: bool) -> str:
    """With the dense model's time on a GPU; on a CPU it would say more about the day than about the model."""
    if "speedup" not in found:
        return "-"
    return f"{found['speedup']:.2f}x" + (f" ({found['dense_ms']:.3g} ms)" if on_gpu else "")


def numbers(kind: type) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--shapes", choices=("bert-base", "minilm"), help="random weights of these shapes")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", default="sst2,stsb")
    parser.add_argument("--batches", type=numbers(int), default=None, help="1,32,256; with --predict 32")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--ratios", type=numbers(float), default=[0.7, 0.5, 0.3])
    parser.add_argument("--loss", type=float, default=1.0, help="points that may be lost")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--runtimes", default="eager,compile,onnx", help=f"of {','.join(RUNTIMES)}")
    parser.add_argument("--table", default="eager", choices=TABLES, help="runtime of the latency tables")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for each latency table")
    parser.add_argument("--patience", type=int, default=180, help="seconds for each runtime")
    parser.add_argument("--predict", action="store_true", help="predicted against measured only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.batches = args.batches or ([32] if args.predict else [1, 32, 256])
    if args.shapes is None and (args.models is None or args.data is None):
        parser.error("give --shapes, or --models and --data")

    parts = [args.device.split(":")[0], args.shapes or "tasks", *["graphs"] * (args.table == "graphs")]
    name = "-".join([*parts, *["predict"] * args.predict])
    words = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in _given(parser, args).items())
    record = {
        **describe_machine(torch.device(args.device)),
        "command": f"python benchmarks/latency.py {words}".replace(" True", "").strip(),
        "seq_len": args.seq_len,
        "dtype": args.dtype,
        "table": args.table,
    }
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for row in with_random_weights(args) if args.shapes else at_matched_accuracy(args):
        rows.append(row)
        text = markdown(rows, record)  # after every row: a run that is cut short has kept what it found
        (args.out / f"latency-{name}.json").write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
        (args.out / f"latency-{name}.md").write_text(text)
        print(text.splitlines()[-1] if len(rows) > 1 else text, flush=True)
    print(text)


def _given(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """The options that are not the default; folders by a name that says nothing about this machine."""
    shown = {}
    for key, value in vars(args).items():
        if value != parser.get_default(key) and key != "out":
            plain = ",".join(map(str, value)) if isinstance(value, list) else value
            shown[key] = key.upper() if isinstance(value, Path) else plain
    return shown


if __name__ == "__main__":
    main()
