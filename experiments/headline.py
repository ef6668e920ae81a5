"""The README's first screen from the kept results: its picture and its three rows. `python experiments/headline.py`

The scores come from `benchmarks/results/accuracy.json`, speed and size from `results/sizes.json`. The colours of the
picture have enough contrast on white and on black, because a README is read on either.
"""

from __future__ import annotations

import re
from io import StringIO
from statistics import fmean, median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from tables import BENCHMARKS, EXPERIMENTS, ROOT, Row, markdown, put, read

PICTURE = ROOT / "docs" / "images" / "headline.svg"
WORDS, SURGEON, PAPER = "#717a84", "#1a86d0", "#8b949e"
BUDGETS = (0.5, 0.3, 0.1)
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "headline", "font.family": "sans-serif", "font.size": 12,
    "text.color": WORDS, "axes.edgecolor": WORDS, "axes.labelcolor": WORDS, "xtick.color": WORDS, "ytick.color": WORDS,
}  # fmt: skip


def means(rows: list[Row], method: str, value: str) -> dict[float, float]:
    """By budget, the mean over the tasks."""
    mine = [row for row in rows if row.get("method", method) == method]
    budgets = sorted({row["flops"] for row in mine})
    return {flops: fmean(row[value] for row in mine if row["flops"] == flops) for flops in budgets}


def picture(rows: list[Row]) -> str:
    dense = fmean({row["task"]: row["dense"] for row in rows}.values())
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.axhline(dense, color=WORDS, lw=1.2, ls=(0, (5, 3)))
        axes.annotate(f"dense {dense:.1f}", (1.0, dense), xytext=(0, 4), textcoords="offset points", ha="right")
        for method, colour, width, drop in (("paper", PAPER, 1.8, (10, -4)), ("surgeon", SURGEON, 4.0, (4, -20))):
            values = means(rows, method, "value") | {1.0: dense}
            axes.plot(values.keys(), values.values(), "o-", color=colour, lw=width, ms=2.2 + width, zorder=3)
            at = min(values) if method == "surgeon" else 0.3
            weight = "bold" if method == "surgeon" else "normal"
            axes.annotate(method, (at, values[at]), xytext=drop, textcoords="offset points", va="center",
                          color=colour, fontweight=weight, fontsize=13)  # fmt: skip
        axes.set_ylim(top=88)
        axes.set_xlabel("FLOPs of the layers, of dense")
        axes.set_ylabel("mean score of four tasks")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        axes.set_xticks([1.0, 0.7, 0.5, 0.3, 0.2, 0.1])
        axes.grid(axis="y", lw=0.6, color=WORDS, alpha=0.3)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        return _svg(figure)


def _svg(figure: Any) -> str:
    drawn = StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.DOTALL)
    words = (
        "Mean score of four tasks against FLOPs: surgeon stays near the dense line down to 20%, paper falls from 50% on"
    )
    return re.sub(r"(<svg[^>]*)>", rf'\1 role="img" aria-label="{words}">', text, count=1)


def three_rows(scores: list[Row], sizes: list[Row]) -> str:
    """Change of the score (mean over the tasks, its range in brackets), speed-up (median: timings scatter) and size."""
    lines = []
    for flops in BUDGETS:
        changes = [-row["drop"] for row in scores if row["method"] == "surgeon" and row["flops"] == flops]
        mine = [row for row in sizes if row["flops"] == flops]
        lines.append([
            f"{flops:.0%}",
            f"{fmean(changes):+.1f} ({min(changes):+.1f} to {max(changes):+.1f})",
            f"{median(row['speedup'] for row in mine):.1f} times",
            f"{fmean(row['megabytes'] for row in mine):.0f} of {mine[0]['dense_megabytes']:.0f} MB",
        ])  # fmt: skip
    return markdown(["FLOPs", "change of the score, points", "faster on a CPU", "size"], lines)


def main() -> None:
    scores = read(BENCHMARKS / "accuracy.json")["rows"]
    PICTURE.write_text(picture(scores), encoding="utf-8")
    put("README.md", "headline", three_rows(scores, read(EXPERIMENTS / "sizes.json")["rows"]))


if __name__ == "__main__":
    main()
