"""The target of a run: ratios, a latency table, a shape."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shearling.costs import KINDS, Limit, flops_limit, params_limit, ratio_of
from shearling.errors import ConstraintError
from shearling.latency.table import Table, check_fits, load_table
from shearling.methods import Method
from shearling.methods.ranges import Shape, check_batch, checked_multiple, checked_shape
from shearling.methods.stock import check_shape
from shearling.models.structure import Structure

BY = "flops"  # default kind of budget where only a loss is given
TableLike = Table | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Target:
    """Ratios of the dense model's costs, all of which must hold, and options for meeting them."""

    flops: float | None = None
    params: float | None = None
    multiple_of: int | None = None
    latency: float | None = None
    table: TableLike = None
    correct: bool = True
    batch_size: int | None = None  # that of the table, else 1
    seq_len: int | None = None
    shape: Shape = "uneven"

    @property
    def times(self) -> Table | None:
        """The latency table, once `checked` has read it."""
        return self.table if isinstance(self.table, Table) else None

    def checked(self) -> Target:
        """Validate the target and read its table; raises before any work is done."""
        checked_shape(self.shape)
        checked_multiple(self.multiple_of)
        check_batch(self.batch_size, self.seq_len)
        given = {name: getattr(self, name) for name in KINDS}
        ratios: dict[str, Any] = {n: ratio_of(n, value) for n, value in given.items() if value is not None}
        if not ratios:
            raise ConstraintError(
                "Give a constraint: flops=0.5, params=0.5 or latency=0.5 (--flops 0.5 ...), or several together."
            )
        if self.latency is None and self.table is not None:
            raise ConstraintError(
                "--table is of use with --latency only, and there is no latency; ask for one: latency=0.5."
            )
        table = load_table(self.table) if isinstance(self.table, (str, os.PathLike)) else self.table
        if table is not None:
            self._check_shape_of(table)
        return replace(self, **ratios, table=table)

    def _check_shape_of(self, table: Table) -> None:
        """Raise if the requested batch size or length differs from the table's."""
        batch = table.batch_size if self.batch_size is None else self.batch_size
        length = table.seq_len if self.seq_len is None else self.seq_len
        if (batch, length) != (table.batch_size, table.seq_len):
            raise ConstraintError(
                f"The latency table is of batch {table.batch_size}, length {table.seq_len}, and batch {batch}, length "
                f"{length} is asked for; leave --batch-size and --seq-len out, or measure a table of that shape."
            )

    def limits(self, structure: Structure, lengths: Sequence[float]) -> list[Limit]:
        """The limits on FLOPs and parameters; those on latency come from the table."""
        limits = []
        if self.flops is not None:
            limits.append(flops_limit(structure, lengths, self.flops))
        if self.params is not None:
            limits.append(params_limit(structure, self.params))
        return limits

    def check_fits(self, structure: Structure, method: Method) -> None:
        """Raise if the table is of another model, or the method or model does not support the shape."""
        check_shape(self.shape, method, structure)
        if self.times is not None:
            check_fits(self.times, structure)
