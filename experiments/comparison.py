"""Beside the prior methods: drop from their own baseline as the paper's table gives it, and what pruning costs.

The prior methods (and the paper's own line) are of BERT-base, most of them retrained; our points are of the models
given here and are not retrained. They share the axes, not the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import PAPER, SURGEON, Lab, Row, aligned, main

from shearling.report.charts import Point, Series, chart

# Change of the metric against each paper's own baseline (BERT-base), from the paper's appendix: FLOPs -> points.
# MRPC of Flop and SLIP is F1.
PRIOR = {
    "Flop": {"qnli": {0.667: -2.6}, "sst2": {0.667: -0.6}, "mrpc": {0.667: -2.3}},
    "SLIP": {
        "qqp": {0.656: -0.9, 0.615: -1.7},
        "qnli": {0.656: -0.9, 0.615: -2.1},
        "sst2": {0.656: -1.0, 0.615: -0.9},
        "mrpc": {0.656: -1.0, 0.615: -2.8},
    },
    "Sajjad et al.": {
        "qqp": {0.667: -0.4, 0.5: -0.7},
        "qnli": {0.667: -1.4, 0.5: -3.5},
        "sst2": {0.667: -1.8, 0.5: -2.2},
        "mrpc": {0.667: -8.6, 0.5: -7.8},
    },
    "DynaBERT": {"sst2": {0.75: -0.6, 0.5: -1.0}, "mrpc": {0.75: -1.7, 0.5: -1.7}},
    "EBERT": {
        "qqp": {0.6: -0.4, 0.5: -0.7},
        "qnli": {0.6: -1.3, 0.5: -1.9},
        "sst2": {0.6: -1.0, 0.5: -1.6},
    },
    "BMP": {"qqp": {0.5: -0.7}, "sst2": {0.5: -2.0, 0.726: -0.6, 0.565: -1.2, 0.467: -1.9}},
    "the paper": {
        "qqp": {0.7: -0.3, 0.6: -0.6, 0.5: -1.5},
        "qnli": {0.7: -0.5, 0.6: -1.4, 0.5: -2.7},
        "sst2": {0.7: -0.6, 0.6: -1.1, 0.5: -2.0},
        "mrpc": {0.7: -0.2, 0.6: -1.0, 0.5: -3.1},
    },
}
# Epochs of training and hours on one V100 (MNLI), from the paper's table of pruning cost.
COST = {"DynaBERT": (4, 12), "EBERT": (6, 5), "BMP": (20, 17), "CoFi": (40, 33), "the paper": (0, 0.01)}
BUDGETS = (0.7, 0.6, 0.5)


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        for method, points in PRIOR.items():
            for flops, change in points.get(task, {}).items():
                yield {"task": task, "method": method, "flops": flops, "change": change, "source": "paper"}
        for chosen in (SURGEON, PAPER):
            for flops in BUDGETS:
                found = lab.mean(task, chosen, flops)
                yield {
                    "task": task, "method": f"shearling, {chosen.name}", "flops": flops, "change": -found["drop"],
                    "source": "measured", "seconds": found["seconds"],
                }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    lines = [[r["task"], r["method"], f"{r['flops']:.1%}", f"{r['change']:+.2f}", r["source"]] for r in found]
    print(aligned([["task", "method", "FLOPs", "change", "source"], *lines]), end="\n\n")
    measured = {r["method"]: r["seconds"] for r in found if r["source"] == "measured"}
    costs = [[name, str(epochs), f"{hours:g} h"] for name, (epochs, hours) in COST.items()]
    costs += [[name, "0", f"{seconds:.1f} s"] for name, seconds in measured.items()]
    print(aligned([["pruning cost", "epochs", "time"], *costs]))
    for task in {row["task"] for row in found}:
        picture = chart(
            [_series(found, task, name) for name in _names(found, task)],
            title=f"{task}: change from the baseline",
            x_label="FLOPs, of dense",
            y_label="points",
            x_format="{:.0%}".format,
        )
        (lab.out / f"comparison-{task}.svg").write_text(picture, encoding="utf-8")


def _names(found: list[Row], task: str) -> list[str]:
    """Ours first, so that their colours stay the same from task to task."""
    names = dict.fromkeys(row["method"] for row in found if row["task"] == task)
    return sorted(names, key=lambda name: not name.startswith("shearling"))


def _series(found: list[Row], task: str, name: str) -> Series:
    points = [Point(r["flops"], r["change"]) for r in found if r["task"] == task and r["method"] == name]
    return Series(name, points, line=name == "the paper" or name.startswith("shearling"))


if __name__ == "__main__":
    main(sys.modules[__name__])
