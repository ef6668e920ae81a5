"""Put the kept results into the documentation, between their marks and as pictures: `python experiments/tables.py`.

The figures come from `experiments/results` and `benchmarks/results`, written by the commands named beside each table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from finer import read as finer_points
from finer import table as finer_table
from lm import table as lm_table

from shearling.report.charts import Level, Point, Series, chart

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS, BENCHMARKS = ROOT / "experiments" / "results", ROOT / "benchmarks" / "results"
EMBEDDING_ROWS = EXPERIMENTS / "embedding.json"
STUDY_FLOPS = 0.5  # of the studies, unless a line says otherwise
NOTABLE = 0.05  # a stage's share of the time
SEARCHES = {
    "xquad, dense index": "XQuAD, dense index",
    "xquad": "XQuAD",
    "squad, dense index": "SQuAD, dense index",
    "squad": "SQuAD",
    "stsb": "STS-B",
}
Row = dict[str, Any]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    cells = [head, ["---"] * len(head), *([str(cell) for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def by_task(name: str, keys: Sequence[str], value: str = "value") -> str:
    """A line per combination of keys, a column per task, and the mean where every task is there."""
    rows: list[Row] = read(EXPERIMENTS / f"{name}.json")["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    sums: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        sums.setdefault(tuple(row[k] for k in keys), {}).setdefault(row["task"], []).append(row[value])
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


def seeds() -> str:
    rows: list[Row] = read(EXPERIMENTS / "seeds.json")["rows"]
    numbers = ("dense", "value", "deviation", "low", "high")
    lines = [[r["task"], f"`{r['method']}`", *(f"{r[name]:.2f}" for name in numbers)] for r in rows]
    return markdown(["task", "method", "dense", "mean", "deviation", "lowest", "highest"], lines)


def base_size() -> str:
    """A line per variant, a column per budget; * where the tuning stopped early."""
    rows: list[Row] = read(EXPERIMENTS / "base_size.json")["rows"]
    budgets = list(dict.fromkeys((row["task"], row["flops"]) for row in rows))
    found: dict[str, dict[Any, str]] = {}
    for row in rows:
        stopped = "*" * any("stopped" in note for note in row["notes"])
        found.setdefault(row["variant"], {})[row["task"], row["flops"]] = f"{row['value']:.1f}{stopped}"
    head = [f"{task}, {flops:.0%}" for task, flops in budgets]
    return markdown(["variant", *head], ([name, *(line.get(b, "-") for b in budgets)] for name, line in found.items()))


def high_sparsity() -> str:
    rows: list[Row] = sorted(read(EXPERIMENTS / "high_sparsity.json")["rows"], key=lambda row: -row["flops"])
    lines = [
        [
            r["task"],
            f"{r['flops']:.0%}",
            r["start"],
            "with a teacher" if r["teacher"] else "plain",
            *(f"{r[name]:.1f}" for name in ("dense", "before", "after")),
        ]
        for r in rows
    ]
    return markdown(["task", "FLOPs", "start", "retraining", "dense", "pruned", "retrained"], lines)


def shapes() -> str:
    lines = []
    for r in read(EXPERIMENTS / "shapes.json")["rows"]:
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in r["seconds"].items())
        lines.append([r["shape"], f"`{r['method']}`", f"{r['flops']['ratio']:.1%}", f"{r['total']:.2f}", stages])
    return markdown(["shapes", "method", "FLOPs", "seconds", "stages"], lines)


def precision() -> str:
    """Both figures in one table: units that differ (in %), and the metric, each as the mean over the tasks."""
    cells: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for row in read(EXPERIMENTS / "precision.json")["rows"]:
        cells.setdefault((row["method"], row["flops"]), {}).setdefault(row["precision"], []).append(row)
    names = list(next(iter(cells.values())))
    lines = []
    for (method, flops), found in cells.items():
        means = [[sum(r[key] for r in found[n]) / len(found[n]) for key in ("differ", "value")] for n in names]
        lines.append([method, f"{flops:.0%}", *(f"{differ:.2f} / {value:.1f}" for differ, value in means)])
    return markdown(["method", "FLOPs", *names], lines)


def real_models(task: str) -> str:
    """A line per model, method and sample, a column per budget."""
    lines: dict[tuple[Any, ...], dict[float, float]] = {}
    for r in read(EXPERIMENTS / "real_models.json"):
        if r["task"] == task:
            key = (r["model"], f"`{r['method']}`", f"{r['samples']:,} x {r['max_length']}", r["eval_examples"])
            lines.setdefault(key, {})[r["flops"]] = r["value"]
    lines = {key: found for key, found in lines.items() if len(found) > 1}
    budgets = sorted({flops for found in lines.values() for flops in found}, reverse=True)
    head = ["model", "method", "examples x tokens", "scored on", *(f"{flops:.0%}" for flops in budgets)]
    body = [[*key, *(f"{found[f]:.1f}" if f in found else "-" for f in budgets)] for key, found in lines.items()]
    return markdown(head, body)


def search() -> str:
    """A line per model, budget and polish: both searches in both modes, and similarity."""
    lines = [[r["model"], f"{r['flops']:.0%}", *polished(r), *scores(r)] for r in embedding_rows("budget")]
    return markdown(["model", "FLOPs", "polish", "passes", *SEARCHES.values()], lines)


def studies() -> str:
    """A line per setting of every study, all at one budget."""
    names = {
        "texts": "number of texts", "domain": "kind of texts", "lengths": "powers of a text's length",
        "draws": "draws of the loss", "loss": "loss of polish", "direction": "loss of measuring",
    }  # fmt: skip
    lines = []
    for r in embedding_rows(*names):
        setting = {
            "texts": f"{r['texts']:,}", "domain": f"{r['texts']:,} of {r.get('domain')}",
            "draws": f"{r.get('draws')}, seed {r.get('seed')}", "loss": r.get("recipe"), "direction": "not normalised",
            "lengths": "{:g} in measuring, {:g} in refitting".format(*r.get("powers", (0, 0))),
        }[r["study"]]  # fmt: skip
        cosine = f"{r['cosine']:.1f}" if "cosine" in r else "-"
        setting = setting if r["flops"] == STUDY_FLOPS else f"{setting}, at {r['flops']:.0%}"
        lines.append([names[r["study"]], setting, *polished(r, all_recipes=r["study"] != "loss"), cosine, *scores(r)])
    return markdown(["study", "setting", "polish", "passes", "mean cosine", *SEARCHES.values()], lines)


def one_query() -> str:
    """How many times faster one query is than with the dense model, whose time is in brackets."""
    lines = []
    for r in embedding_rows("latency"):
        ratios = [
            f"{r[f'{name}ratio']:.2f}x ({r[f'{name}dense_ms']:.1f} ms)" if f"{name}ratio" in r else "-"
            for name in ("", "onnx_")
        ]
        cpu = r["device"].partition("(R)")[0]
        lines.append([r["model"], f"{r['flops']:.0%}", r["tokens"], cpu, r["threads"], *ratios])
    return markdown(["model", "FLOPs", "tokens", "CPU", "threads", "PyTorch", "ONNX Runtime"], lines)


def embedding_rows(*studies: str) -> list[Row]:
    """The kept rows of these studies, study by study."""
    rows: list[Row] = read(EMBEDDING_ROWS)
    return [row for study in studies for row in rows if row["study"] == study]


def scores(row: Row) -> list[str]:
    return [f"{row[name]:.1f}" if name in row else "-" for name in SEARCHES]


def polished(row: Row, *, all_recipes: bool = True) -> list[object]:
    """How a model was polished: the setting with its recipe, unless that is the usual one, and the passes done."""
    words = [row.get("polish", "-"), row.get("recipe") if all_recipes else None]
    return [", ".join(filter(None, words)), row.get("passes", "-")]


def search_pictures() -> dict[str, str]:
    """By model, a chart of R@1 on XQuAD against the budget, in both modes, without polish."""
    modes = {"on the dense index": "xquad, dense index", "on its own index": "xquad"}
    found = {}
    for model in dict.fromkeys(row["model"] for row in embedding_rows("budget")):
        rows = [r for r in embedding_rows("budget") if r["model"] == model and r.get("polish", "off") == "off"]
        dense = next(row["xquad"] for row in rows if row["flops"] == 1)
        series = [Series(label, [Point(r["flops"], r[key]) for r in rows]) for label, key in modes.items()]
        found[model] = chart(
            series, levels=[Level(dense, f"dense {dense:.1f}", strong=True), Level(dense - 1, "1 point below")],
            title=f"{model}, without polish", x_label="FLOPs of the layers, of dense", y_label="R@1, XQuAD",
            x_format="{:.0%}".format,
        )  # fmt: skip
    return found


def rivals(model: str) -> str:
    """The harness's own table of one model."""
    return lm_table([row for row in lines_of("lm") if row["model"] == model])


def lm_variants() -> str:
    """A line per variant and share: both perplexities, as they are and relative to the dense model's."""
    found, rows = [], [row for row in lines_of("lm-variants") if row["method"] != "dense"]
    dense = next(row for row in lines_of("lm") if row["method"] == "dense")
    for row in rows:
        name = row["method"] + "".join(f" ({row[key]})" for key in ("own",) if key in row)
        sample = "SQuAD" if "squad" in row["model"] else "WikiText-2"
        both = [row[domain] for domain in ("wikitext2", "squad")]
        times = " / ".join(f"{row[domain] / dense[domain]:.2f}" for domain in ("wikitext2", "squad"))
        found.append([f"`{name}`", sample, f"{row['share']:.0%}", " / ".join(f"{v:.2f}" for v in both), times])
    return markdown(["variant", "sample", "share", "WikiText-2 / SQuAD", "of dense"], found)


def polish_base() -> str:
    """A line per model, budget and variant: points lost, and the judge after over before."""
    lines = []
    for row in lines_of("polish-base-size"):
        judge = f"{row['after'] / row['before']:.2f}" if "before" in row else ""
        task = row["task"] + ", another run" * ("another" in row["model"])
        lines.append([task, f"{row['flops']:.0%}", row["variant"], f"{row['dense'] - row['value']:.2f}", judge])
    return markdown(["fine-tuned on", "FLOPs", "variant", "points lost", "judge"], sorted(lines, key=lambda x: x[:2]))


def lines_of(name: str) -> list[Row]:
    """The rows of a file with one a line."""
    return [json.loads(line) for line in (EXPERIMENTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def finer() -> str:
    """The experiment's own table."""
    head, *lines = finer_table(finer_points(EXPERIMENTS / "finer.jsonl"))
    return markdown(head, lines)


def finer_latency() -> str:
    """Ratios of time to whole heads, a column for every shape of input; of chosen models the mean over tasks."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in read(EXPERIMENTS / "finer_latency.json")["rows"]:
        what = row["what"].split(" at ")[-1]
        for name, ratio in row["ratios"].items():
            if ratio != 1:
                shape = f"{row['batch']} x {row['length']}"
                found.setdefault((what, name), {}).setdefault(shape, []).append(ratio)
    shapes = list(next(iter(found.values())))
    places = list(dict.fromkeys(what for what, _ in found))
    lines = [
        [*key, *(f"{sum(found[key][s]) / len(found[key][s]):.2f}" for s in shapes)]
        for key in sorted(found, key=lambda key: places.index(key[0]))
    ]
    return markdown(["FLOPs of", "layout", *shapes], lines)


def speed() -> str:
    """Seconds as users meet them: a process of its own for every row, its first call and the best of the later ones."""
    lines = []
    for path in sorted(BENCHMARKS.glob("speed-*.json")):
        run = read(path)
        settings = run["settings"]
        length = f"{settings['length']} tokens" if settings["length"] else "GLUE length"
        sample = f"{settings['shapes']}, {settings['examples']:,} x {length}, {run['machine']['device']}"
        for r in run["rows"]:
            total = sum(r["stages_later"].values())
            parts = {name: seconds / total for name, seconds in r["stages_later"].items()}
            stages = ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part >= NOTABLE)
            times = [f"{r[name]:.1f}" for name in ("first", "later", "one_more_budget", "peak_gib")]
            lines.append([sample, f"`{r['method']}`", f"{r['batch_size']:,}", *times, stages])
    head = [
        "sample",
        "method",
        "batch size",
        "first call",
        "later calls",
        "one more budget",
        "GiB",
        "where (later calls)",
    ]
    return markdown(head, lines)


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


def growth() -> str:
    """Ratios to the base of the same run."""
    lines = []
    for path in sorted(BENCHMARKS.glob("growth-*.json")):
        for r in read(path)["rows"]:
            ratios = ", ".join(f"{stage} {ratio:.1f}" for stage, ratio in r["ratios"].items() if stage != "in all")
            if r["case"] != "base":
                lines.append([f"`{r['method']}`", r["case"], f"{r['ratios']['in all']:.1f}", ratios])
    return markdown(["method", "", "time, of base", "by stage"], lines)


def deploy() -> str:
    """A line per budget and variant: the metric of each task, and means over the tasks of what is lost and gained."""
    lines: dict[tuple[float, str], dict[str, Row]] = {}
    for row in read(EXPERIMENTS / "deploy.json")["rows"]:
        lines.setdefault((row["flops"], row["variant"]), {})[row["task"]] = row
    tasks = list(next(iter(lines.values())))
    body = []
    for (flops, variant), found in lines.items():
        means = {name: sum(r[name] for r in found.values()) / len(found) for name in ("drop", "bytes", "faster")}
        body.append([
            "dense" if flops == 1 else f"{flops:.0%}", variant, *(f"{found[task]['value']:.1f}" for task in tasks),
            f"{means['drop']:.1f}", f"{means['bytes'] / 1e6:.0f}", f"{means['faster']:.1f}x",
        ])  # fmt: skip
    return markdown(["FLOPs", "", *tasks, "mean loss", "MB", "faster"], body)


def latency(name: str) -> str:
    """The benchmark's own table, without its notes."""
    text = (BENCHMARKS / f"latency-{name}.md").read_text(encoding="utf-8")
    head, _, rest = text.partition("\n\n")
    return head + "\n\n" + "\n".join(line for line in rest.splitlines() if line.startswith("|"))


SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "ablation": ("docs/results.md", lambda: by_task("ablation", ("flops", "stages"))),
    "uniform": ("docs/results.md", lambda: by_task("uniform", ("flops", "variant"))),
    "importance": ("docs/results.md", lambda: by_task("importance", ("flops", "rearranged", "importance"))),
    "sample_size": ("docs/results.md", sample_size),
    "seeds": ("docs/results.md", seeds),
    "high_sparsity": ("docs/results.md", high_sparsity),
    "shapes": ("docs/results.md", shapes),
    "embedding": ("docs/results.md", lambda: real_models("embedding")),
    "lm": ("docs/results.md", lambda: real_models("lm")),
    "precision": ("docs/performance.md", precision),
    "tried": ("docs/method.md", lambda: by_task("tried", ("variant", "flops"))),
    "finer": ("docs/method.md", finer),
    "finer_latency": ("docs/method.md", finer_latency),
    "performance": ("docs/performance.md", speed),
    "memory": ("docs/performance.md", memory),
    "base_size": ("docs/method.md", base_size),
    "polish_base": ("docs/method.md", polish_base),
    "released": ("docs/method.md", lambda: by_task("released", ("flops", "variant"))),
    "latency": ("docs/results.md", lambda: latency("cpu-tasks")),
    "single": ("docs/results.md", lambda: latency("cpu-tasks-single")),
    "runtimes": ("docs/results.md", lambda: latency("cuda-bert-base-graphs")),
    "graphs": ("docs/results.md", lambda: latency("cuda-bert-base-graphs-predict")),
    "eager": ("docs/results.md", lambda: latency("cuda-bert-base-predict")),
    "growth": ("docs/performance.md", growth),
    "rivals": ("docs/results.md", lambda: rivals("SmolLM2-135M")),
    "rivals_gemma": ("docs/results.md", lambda: rivals("Gemma 3 270M")),
    "lm_variants": ("docs/results.md", lm_variants),
    "search": ("docs/results.md", search),
    "studies": ("docs/results.md", studies),
    "one_query": ("docs/results.md", one_query),
    "deploy": ("docs/results.md", deploy),
}


def put(page: str, name: str, text: str) -> None:
    """Replace what stands between the marks of this name."""
    path = ROOT / page
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no marks for '{name}'")
    path.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")
    print(f"{page}: {name}")


def main() -> None:
    for name, (page, make) in SECTIONS.items():
        put(page, name, make())
    for model, picture in search_pictures().items():
        (ROOT / "docs" / "images" / f"search-{model}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
