"""How agreement with the dense model, which needs no labels, goes with the loss of score: where should a report warn?

`python experiments/agreement.py SWEEP ...` reads the results of sweeps of classifiers. Agreement is the share of the
evaluation rows that a pruned model classifies as the dense model does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import aligned

from shearling.engine.agreement import POOR

OUT = Path(__file__).parent / "results" / "agreement.json"
FIELDS = ("task", "method", "flops", "agreement", "lost")


def rows(sweep: Path) -> list[dict[str, Any]]:
    """One row a point."""
    told, points = (json.loads((sweep / name).read_text(encoding="utf-8")) for name in ("sweep.json", "results.json"))
    task, samples = told["dense"]["task"], told["settings"]["samples"]
    return [
        {
            "task": task, "method": point["method"], "flops": point["flops"], "seed": point["seed"], "samples": samples,
            "examples": point["flipped"]["examples"], "lost": point["dense"] - point["value"],
            "agreement": 100 * (1 - point["flipped"]["changed"] / point["flipped"]["examples"]),
        }
        for point in points
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP", help="folders that `shearling sweep` wrote")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    found = sorted((row for sweep in given.sweeps for row in rows(sweep)), key=lambda row: -row["agreement"])
    given.out.write_text(json.dumps({"rows": found}, indent=1) + "\n", encoding="utf-8")
    cells = [
        [f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in FIELDS] for row in found
    ]
    print(aligned([FIELDS, *cells]))
    for warned in (False, True):
        lost = [row["lost"] for row in found if (row["agreement"] < POOR["equal"]) is warned]
        if lost:
            told = f"{len(lost)} models, {min(lost):.1f} to {max(lost):.1f} points lost"
            print(f"{'below' if warned else 'from'} {POOR['equal']:g}%: {told}")


if __name__ == "__main__":
    main()
