"""Accuracy of both methods over tasks, budgets and seeds: the table at the top of docs/results.md.

    python benchmarks/accuracy.py --models MODELS --data DATA --seeds 0,1,2,3,4
    python benchmarks/accuracy.py --models MODELS --data DATA --seeds 0 --shape stock [--polish off|PASSES]

MODELS holds one fine-tuned model a task (`python ../shared/tools/assemble_models.py MODELS`), DATA the task's
TASK.train.* and TASK.dev.* files. The sample is 2,048 training examples drawn by the seed; `surgeon` sees no labels.
Points are kept in OUT/points.jsonl, so that an interrupted run goes on; the table goes to OUT/accuracy.json, that of
stock shapes to OUT/accuracy-stock.json, those of another --polish to OUT/accuracy-stock-polish-40.json, those of
`--own-calls` to OUT/accuracy-own-calls.json and the like.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

from common import PAPER, SURGEON, Lab, arguments, execute, lab_of  # noqa: E402
from tables import BENCHMARKS, put, read  # noqa: E402

from shearling.engine.polish import Polish  # noqa: E402

BUDGETS = (0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
STOCK_BUDGETS = (0.6, 0.5, 0.35)
METHODS = (SURGEON, PAPER)
TITLES = {"sst2": "SST-2", "stsb": "STS-B", "mrpc": "MRPC", "qnli": "QNLI"}


def rows(lab: Lab, methods: str = "", budgets: str = "", polish: Polish = "auto") -> Iterator[dict[str, Any]]:
    known = METHODS if lab.shape == "uneven" else (SURGEON,)
    asked = [float(budget) for budget in budgets.split(",") if budget]
    asked = asked or list(BUDGETS if lab.shape == "uneven" else STOCK_BUDGETS)
    for method in [m for m in known if m.name in methods] or known:
        used = replace(method, polish=polish) if polish != "auto" else method
        for task, seed in product(lab.tasks, lab.seeds):  # one measurement serves every budget
            for flops in asked:
                lab.point(task, used, flops, seed)
        for flops, task in product(asked, lab.tasks):
            yield {"method": method.name, **lab.mean(task, used, flops)}


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a line per method and budget, mean and standard deviation over the seeds."""
    tasks = list(dict.fromkeys(row["task"] for row in found))
    dense = {row["task"]: row["dense"] for row in found}
    heads = " | ".join(f"{TITLES.get(task, task)} ({dense[task]:.1f})" for task in tasks)
    lines = [f"| method | FLOPs | {heads} | mean loss |", "|---|---|" + "---|" * (len(tasks) + 1)]
    for method, flops in dict.fromkeys((row["method"], row["flops"]) for row in found):
        line = {row["task"]: row for row in found if (row["method"], row["flops"]) == (method, flops)}
        cells = [_cell(line[task]) if task in line else "-" for task in tasks]
        loss = sum(row["drop"] for row in line.values()) / len(line)
        lines.append(f"| `{method}` | {flops:.0%} | {' | '.join(cells)} | {loss:.1f} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    spread = "" if row["deviation"] is None else f" ± {row['deviation']:.1f}"
    return f"{row['value']:.1f}{spread}"


def kept(name: str, polish: str = "") -> list[dict[str, Any]]:
    """The rows of an earlier run; with another polish than the default, the method's name says so."""
    file, said = (f"{name}-polish-{polish}", f" --polish {polish}") if polish else (name, "")
    return [{**row, "method": row["method"] + said} for row in read(BENCHMARKS / f"{file}.json")["rows"]]


def passes(text: str) -> Polish:
    return int(text) if text.isdigit() else text


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(out=Path(__file__).parent / "results", seeds="0,1,2,3,4")
    parser.add_argument("--methods", default="", help="surgeon or paper alone")
    parser.add_argument("--budgets", default="", help="comma-separated, instead of the table's")
    parser.add_argument("--shape", default="uneven", choices=("uneven", "stock"))
    parser.add_argument("--polish", default="auto", type=passes, help="auto, off or passes")
    parser.add_argument(
        "--own-calls",
        action="store_true",
        help="every point by a call of `shearling.prune` that takes as many of the examples as samples='auto' does",
    )
    parser.add_argument("--write-docs", action="store_true", help="only put the kept results into docs/results.md")
    if "--write-docs" in sys.argv:
        put("docs/results.md", "results", table(kept("accuracy")))
        put("docs/results.md", "calls", table(kept("accuracy-own-calls")))
        put(
            "docs/results.md",
            "stock",
            table([row for polish in ("off", "40") for row in kept("accuracy-stock", polish)]),
        )
        return
    options = parser.parse_args()
    lab = replace(lab_of(options), shape=options.shape, own_calls=options.own_calls)
    variant = [
        *["stock"] * (options.shape == "stock"),
        *[f"polish-{options.polish}"] * (options.polish != "auto"),
        *["own-calls"] * options.own_calls,
    ]
    made = partial(rows, methods=options.methods, budgets=options.budgets, polish=options.polish)
    print(table(execute("-".join(["accuracy", *variant]), made, lab)))


if __name__ == "__main__":
    main()
