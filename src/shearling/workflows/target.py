"""What the pruned model must meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shearling.costs import ratio_of
from shearling.errors import ConstraintError
from shearling.latency.table import load_table
from shearling.methods.ranges import Shape, checked_shape
from shearling.pipeline import Plan, Pruned

if TYPE_CHECKING:
    from shearling.latency.table import Table


@dataclass(frozen=True)
class Target:
    """What the pruned model must meet; `batch_size` and `seq_len` are those of the latency."""

    flops: float | None = None
    params: float | None = None
    multiple_of: int | None = None
    latency: float | None = None
    table: Table | str | os.PathLike[str] | None = None
    correct: bool = True
    batch_size: int = 1
    seq_len: int | None = None
    shape: Shape = "uneven"

    def checked(self) -> Target:
        """Complain about ratios before any work is done."""
        checked_shape(self.shape)
        given = {"flops": self.flops, "params": self.params, "latency": self.latency}
        for name, value in given.items():
            if value is not None:
                ratio_of(f"--{name}", value)
        if all(value is None for value in given.values()):
            raise ConstraintError(
                "Give a constraint: --flops 0.5, --params 0.5 or --latency 0.5 (several may be given together)."
            )
        if self.table is not None:
            if self.latency is None:
                raise ConstraintError("--table is of use with --latency only; ask for one, such as --latency 0.5.")
            if isinstance(self.table, (str, os.PathLike)):
                load_table(self.table)
        return self

    def cut(self, plan: Plan) -> Pruned:
        """Prune to it."""
        return plan.prune(**vars(self))
