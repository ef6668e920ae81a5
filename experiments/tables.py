"""Put the kept results into the documentation, between their marks: `python experiments/tables.py`.

The figures come from `experiments/results` and `benchmarks/results`, written by the commands named beside each table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS, BENCHMARKS = ROOT / "experiments" / "results", ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    cells = [head, ["---"] * len(head), *([str(cell) for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def by_task(name: str, keys: Sequence[str]) -> str:
    """A line per combination of keys, a column per task, and the mean where every task is there."""
    rows: list[Row] = read(EXPERIMENTS / f"{name}.json")["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    sums: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        sums.setdefault(tuple(row[k] for k in keys), {}).setdefault(row["task"], []).append(row["value"])
    lines = []
    for key, found in sums.items():
        means = {task: sum(values) / len(values) for task, values in found.items()}
        mean = f"{sum(means.values()) / len(means):.1f}" if len(means) == len(tasks) else "-"
        lines.append([*key, *(f"{means[t]:.1f}" if t in means else "-" for t in tasks), mean])
    return markdown([*keys, *tasks, "mean"], lines)


def sample_size() -> str:
    rows: list[Row] = read(EXPERIMENTS / "sample_size.json")["rows"]
    lines = [[r["task"], r["method"], r["samples"], f"{r['value']:.1f}", f"{r['seconds']:.2f}"] for r in rows]
    return markdown(["task", "method", "examples", "metric", "seconds"], lines)


def speed() -> str:
    lines = []
    for path in sorted(BENCHMARKS.glob("speed-*.json")):
        run = read(path)
        for method, r in run["methods"].items():
            gpu = run["machine"]["device"].startswith("NVIDIA")  # a CPU's seconds say little; shares and ratios hold
            total = f"{r['seconds']:.2f}" if gpu else "-"
            shown = "{:.2f}" if gpu else "{:.0%}"
            parts = {name: s if gpu else s / r["seconds"] for name, s in r["stages"].items()}
            stages = ", ".join(f"{name} {shown.format(part)}" for name, part in parts.items())
            shape = f"{run['shapes']}, {run['examples']:,} examples, {run['tokens']:,} tokens"
            share = f"{r['over_plain']:.2f}", f"{r['floor_share']:.0%}"
            lines.append([shape, run["machine"]["device"], f"`{method}`", total, *share, stages])
    return markdown(["sample", "device", "method", "seconds", "over forward+backward", "floor", "stages"], lines)


def memory() -> str:
    lines = []
    for path in sorted(BENCHMARKS.glob("memory-*.json")):
        run = read(path)
        for r in run["runs"]:
            size = f"{run['shapes']}, {run['examples']:,} x {run['length']}"
            lines.append(
                [size, run["machine"]["device"], f"`{r['method']}`", f"{r['gib']:.1f}", f"{run['promise_gib']:g}"]
            )
    return markdown(["sample", "device", "method", "GiB at most", "promised"], lines)


SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "ablation": ("docs/results.md", lambda: by_task("ablation", ("flops", "stages"))),
    "uniform": ("docs/results.md", lambda: by_task("uniform", ("flops", "variant"))),
    "importance": ("docs/results.md", lambda: by_task("importance", ("flops", "rearranged", "importance"))),
    "sample_size": ("docs/results.md", sample_size),
    "tried": ("docs/method.md", lambda: by_task("tried", ("variant", "flops"))),
    "performance": ("docs/performance.md", speed),
    "memory": ("docs/performance.md", memory),
}


def main() -> None:
    for name, (page, make) in SECTIONS.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{page} has no marks for '{name}'")
        path.write_text(f"{before}{start}\n{make()}\n{end}{after}", encoding="utf-8")
        print(f"{page}: {name}")


if __name__ == "__main__":
    main()
