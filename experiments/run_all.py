"""Every experiment, the most important first, within a time budget; what is done is kept, and a second call goes on.

python experiments/run_all.py --models DIR --data DIR --out DIR --device cuda --budget-minutes 7
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback

from common import arguments, execute, lab_of

from shearling.errors import ShearlingError

ORDER = (
    "curves", "ablation", "breakdown", "uniform", "importance", "shapes", "sample_size", "seeds", "comparison",
    "precision", "high_sparsity",
)  # fmt: skip


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--budget-minutes", type=float, default=60, help="start nothing new after this long")
    parser.add_argument("--only", help="comma-separated names of experiments")
    options = parser.parse_args()
    began = time.monotonic()
    lab = lab_of(options, deadline=began + 60 * options.budget_minutes)
    failed = []
    for name in options.only.split(",") if options.only else ORDER:
        print(f"\n## {name}  ({time.monotonic() - began:.0f} s)\n", flush=True)
        try:
            module = importlib.import_module(name)
            found = execute(name, module.rows, lab)
            if found:
                module.show(found, lab)
        except ShearlingError as error:  # says itself what is missing
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
        except Exception:  # one experiment's failure must not cost the others
            traceback.print_exc()
            failed.append(name)
    print(f"\n{time.monotonic() - began:.0f} s in all; tables and figures are in {lab.out}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
