"""`Rows`: a small immutable table; the form of all examples between file or data set and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shearling.errors import DataError


class Rows:
    """Named columns of equal length.

    `source` names the origin of the rows in messages.
    """

    __slots__ = ("_columns", "_length", "source")

    def __init__(self, columns: Mapping[str, Sequence[Any]], *, source: str = "the data") -> None:
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{source} has columns of different lengths: {lengths}; give every row every column")
        self._columns = {name: tuple(values) for name, values in columns.items()}
        self._length = next(iter(lengths.values()), 0)
        self.source = source

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]], *, source: str = "the data") -> Rows:
        """Build from one mapping per example; all must have the same keys."""
        places = ((f"row {number} of {source}", record) for number, record in enumerate(records, start=1))
        return cls(columns_of(places), source=source)

    @property
    def names(self) -> tuple[str, ...]:
        """The column names, in order."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Rows({len(self)} x {list(self.names)} of {self.source})"

    def column(self, name: str) -> tuple[Any, ...]:
        """All values of one column."""
        if name not in self._columns:
            raise DataError(f"{self.source} has no column {name!r}; it has {list(self.names)}")
        return self._columns[name]

    def select(self, indices: Iterable[int]) -> Rows:
        """The rows at `indices`, in this order."""
        chosen = list(indices)
        columns = {name: [values[i] for i in chosen] for name, values in self._columns.items()}
        return Rows(columns, source=self.source)

    def head(self, limit: int | None) -> Rows:
        """The first `limit` rows; None means all."""
        if limit is None or limit >= len(self):
            return self
        if limit < 1:
            raise DataError(f"{limit} rows of {self.source} were asked for; ask for at least 1")
        return self.select(range(limit))

    def fingerprint(self) -> str:
        """SHA-256 of the contents, independent of the source."""
        digest = hashlib.sha256()
        for name in sorted(self._columns):
            digest.update(json.dumps([name, self._columns[name]], default=str).encode())
        return digest.hexdigest()


def columns_of(records: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Turn (location, object) pairs into columns, named by the first object."""
    columns: dict[str, list[Any]] = {}
    for index, (place, record) in enumerate(records):
        if not isinstance(record, Mapping):
            raise DataError(
                f"{place} is a JSON {type(record).__name__}, not an object; write it as {{column: value, ...}}"
            )
        if index == 0:
            columns = {name: [] for name in record}
        if record.keys() != columns.keys():
            raise DataError(
                f"{place} has the columns {sorted(record)}, the first row has {sorted(columns)}; "
                "give every row the same columns (null where a value is missing)"
            )
        for name, values in columns.items():
            values.append(record[name])
    return columns


def as_rows(data: Any, *, limit: int | None = None, source: str = "the data") -> Rows:
    """Convert Rows, a `datasets.Dataset`, a path, or a list of mappings to `Rows`."""
    # Imported here because files.py imports this module.
    from shearling.data.files import read_rows

    if isinstance(data, Rows):
        rows = data
    elif hasattr(data, "column_names") and hasattr(data, "with_format"):
        rows = _from_dataset(data, source)
    elif hasattr(data, "__fspath__") or isinstance(data, str):
        return read_rows(data, limit=limit)
    elif isinstance(data, Sequence) and all(isinstance(row, Mapping) for row in data):
        rows = Rows.from_records(data, source=source)
    else:
        raise DataError(
            f"the data is a {type(data).__name__}; give a file, a datasets.Dataset, Rows or a list of dicts"
        )
    if len(rows) == 0:
        raise DataError(f"{rows.source} has no rows; give at least one example")
    return rows.head(limit)


def _from_dataset(dataset: Any, source: str) -> Rows:
    """Convert a `datasets.Dataset` without importing `datasets`."""
    if isinstance(dataset.column_names, Mapping):  # a DatasetDict maps splits to columns
        splits = list(dataset.column_names)
        raise DataError(f"the data is a DatasetDict with the splits {splits}; choose one, as in data[{splits[0]!r}]")
    plain = dataset.with_format(None)
    if not hasattr(plain, "__len__"):
        raise DataError("the data set is streamed and has no length; give list(dataset.take(n)) instead")
    return Rows(plain[:], source=source)
