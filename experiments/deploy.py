"""What to serve: dense and pruned models in PyTorch and as int8 ONNX files, with size, latency and metric.

Latency is of one example at a time on this CPU, all variants of a task taking turns, in as many threads as PyTorch
has; `faster` is against the dense model in float32 PyTorch. A task that is finished is kept in `points.jsonl`, so an
interrupted run goes on with the next one. Needs `shearling[export]`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import SURGEON, Lab, Row, main, pivot

from shearling.data import find_task
from shearling.exporters import onnx
from shearling.exporters.formats import Job
from shearling.exporters.inputs import CALIBRATION, Inputs, inputs_from_rows
from shearling.latency.timing import in_turns
from shearling.workflows.export import FileModel

BUDGETS = (None, 0.5, 0.3)
PRECISIONS = ("float32", "int8-dynamic", "int8-static")
EXAMPLES = 16  # timed one by one
ROUNDS = 10


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        key = json.dumps(["deploy", task, lab.seeds[0], lab.samples, lab.limit, torch.get_num_threads()])
        yield from lab.kept(key, lambda task=task: {"rows": _measured(lab, task)})["rows"]


def _measured(lab: Lab, task: str) -> list[Row]:
    """Every variant of one task."""
    bench = lab.bench(task)
    model = bench.model.cpu()
    calibration = inputs_from_rows(
        model, bench.tokenizer, bench.train, find_task(task), samples=CALIBRATION, seed=lab.seeds[0]
    )
    single = [{k: v[i : i + 1] for k, v in b.items()} for b in calibration for i in range(len(b["input_ids"]))]
    examples = [_unpadded(example) for example in single[:EXAMPLES]]
    with tempfile.TemporaryDirectory() as folder:
        found: list[Row] = []
        runs = []
        for flops in BUDGETS:
            small = model if flops is None else lab.pruned(task, SURGEON, flops, lab.seeds[0]).model.cpu()
            for name, size, taken, run in _variants(small, calibration, Path(folder) / f"{flops}"):
                value = bench.exam.take(taken, device="cpu").value
                found.append({"task": task, "flops": flops or 1.0, "variant": name, "bytes": size, "value": value})
                runs.append(_over(run, examples))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        times = in_turns(runs, torch.device("cpu"), rounds=ROUNDS)
    for row, time in zip(found, times, strict=True):
        row["drop"] = found[0]["value"] - row["value"]
        row["milliseconds"] = 1e3 * time.median / EXAMPLES
        row["faster"] = times[0].median / time.median
    return found


def _variants(model: Any, calibration: list[Inputs], folder: Path) -> Iterator[tuple[str, int, Any, Any]]:
    """The model in PyTorch, then as a file in each precision."""
    folder.mkdir()

    def plain(inputs: Inputs) -> Any:
        with torch.inference_mode():
            return model(**inputs)

    yield "PyTorch float32", sum(p.numel() * 4 for p in model.parameters()), model, plain
    paths = {precision: folder / f"{precision}.onnx" for precision in PRECISIONS}
    onnx.write(Job(model, calibration[0], ["logits"], paths["float32"]))
    onnx.quantise_dynamic(paths["float32"], paths["int8-dynamic"])
    onnx.quantise_static(paths["float32"], paths["int8-static"], calibration)
    for precision, path in paths.items():
        run = onnx.open_runner(path)
        yield f"ONNX {precision}", path.stat().st_size, FileModel(model, run), run


def _unpadded(example: Inputs) -> Inputs:
    length = int(example["attention_mask"].sum())
    return {name: tensor[:, :length] for name, tensor in example.items()}


def _over(run: Callable[[Inputs], object], examples: list[Inputs]) -> Callable[[], object]:
    return lambda: [run(example) for example in examples]


def show(found: list[Row], lab: Lab) -> None:
    for value, what in (("value", "metric"), ("drop", "points lost"), ("faster", "times faster than dense PyTorch")):
        print(f"{what}:\n" + pivot(found, ("flops", "variant"), value=value) + "\n")
    print("megabytes:\n" + pivot([row | {"megabytes": row["bytes"] / 1e6} for row in found], ("flops", "variant"),
                                 value="megabytes"))  # fmt: skip


if __name__ == "__main__":
    main(sys.modules[__name__])
