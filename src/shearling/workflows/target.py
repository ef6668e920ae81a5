"""What the pruned model must meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shearling.costs import Constraint
from shearling.latency.meet import TableLike, read_table
from shearling.methods.ranges import Shape, checked_shape
from shearling.pipeline import Plan, Pruned


@dataclass(frozen=True)
class Target:
    """What the pruned model must meet; `batch_size` and `seq_len` are those of the latency."""

    flops: float | None = None
    params: float | None = None
    multiple_of: int | None = None
    latency: float | None = None
    table: TableLike = None
    correct: bool = True
    batch_size: int = 1
    seq_len: int | None = None
    shape: Shape = "uneven"

    def checked(self) -> Target:
        """The target with its table read; complains about ratios before any work is done."""
        checked_shape(self.shape)
        Constraint.of(flops=self.flops, params=self.params, latency=self.latency)
        return replace(self, table=read_table(self.table, self.latency))

    def cut(self, plan: Plan) -> Pruned:
        """Prune to it."""
        return plan.prune(**vars(self))
