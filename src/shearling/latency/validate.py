"""Is this file a latency table that can be used? Every complaint says where, what was found, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.errors import TableError
from shearling.latency.runtime import RUNTIMES

if TYPE_CHECKING:
    from shearling.latency.table import Table
    from shearling.models.structure import Structure

MAX_BYTES = 64 * 2**20
LONGEST = 3600.0  # seconds; one forward pass does not take an hour
REMEDY = "Measure it again with `shearling profile`."


def validated(path: Path) -> dict[str, Any]:
    """The file's contents, once every field is what a table needs."""
    from shearling.latency.table import FORMAT

    try:
        if path.stat().st_size > MAX_BYTES:
            raise TableError(f"{path} is larger than {MAX_BYTES >> 20} MiB; it is no latency table. {REMEDY}")
        record = json.loads(path.read_text(encoding="utf-8"))
    except TableError:
        raise
    except OSError as error:
        raise TableError(f"Cannot read the latency table {path}: {error.strerror or error}. {REMEDY}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise TableError(f"{path} is not a latency table: {error}. {REMEDY}") from None
    if not isinstance(record, dict) or "sublayers" not in record:
        raise TableError(f"{path} is not a latency table: it has no 'sublayers'. {REMEDY}")
    if record.get("format") != FORMAT:
        found = record.get("format")
        raise TableError(f"{path} has table format {found!r}; this version reads format {FORMAT}. {REMEDY}")
    _fields(record, _TABLE, str(path))
    for number, entry in enumerate(record["sublayers"]):
        where = f"{path}, sublayers[{number}]"
        if not isinstance(entry, dict):
            raise _wrong(where, entry, "an object")
        _fields(entry, _ENTRY, where)
        _check_entry(entry, where)
    _check_totals(record, str(path))
    return record


def check_fits(table: Table, structure: Structure) -> None:
    """Raise unless the table was measured on a model of this shape."""
    from shearling.latency.table import shape_of

    model_type = structure.model.config.model_type
    if table.model_type != model_type:
        raise TableError(
            f"The latency table is of a {table.model_type} model, this one is {model_type}. "
            "Measure this model with `shearling profile`."
        )
    if table.layers != structure.sizes:
        raise TableError(
            f"The latency table is of a model with {_sizes(table.layers)}; this one has {_sizes(structure.sizes)}. "
            "Measure this model with `shearling profile`."
        )
    known = {entry.shape: entry.units[-1] for entry in table.sublayers}
    for number, sublayer in enumerate(structure.sublayers):
        shape = shape_of(structure, number)
        if sublayer.units and known.get(shape, -1) < sublayer.units:
            raise TableError(
                f"The latency table has no times for the {sublayer.name} ({sublayer.units} units of width "
                f"{sublayer.width}, hidden size {shape[3]}). Measure this model with `shearling profile`."
            )


def _sizes(layers: Sequence[dict[str, int]]) -> str:
    """`12 layers of 12 heads and 3072 filters`, or the sizes themselves where layers differ."""
    alike = all(layer == layers[0] for layer in layers)
    if not alike:
        return f"{len(layers)} layers {layers}"
    return f"{len(layers)} layers of " + " and ".join(f"{count} {kind}" for kind, count in layers[0].items())


def _fields(record: dict[str, Any], rules: dict[str, tuple[Callable[[Any], bool], str]], where: str) -> None:
    missing = sorted(name for name in rules if name not in record and name not in _OPTIONAL)
    if missing:
        raise TableError(f"{where}: no field {', '.join(repr(m) for m in missing)}. {REMEDY}")
    unknown = sorted(set(record) - set(rules) - {"format", "sublayers"})
    if unknown:
        raise TableError(f"{where}: unknown field {', '.join(repr(u) for u in unknown)}. {REMEDY}")
    for name, (holds, wanted) in rules.items():
        if name in record and not holds(record[name]):
            raise _wrong(f"{where}, '{name}'", record[name], wanted)


def _wrong(where: str, found: Any, wanted: str) -> TableError:
    shown = repr(found) if len(repr(found)) < 60 else repr(found)[:57] + "..."
    return TableError(f"{where}: {shown} is not {wanted}. {REMEDY}")


def _check_entry(entry: dict[str, Any], where: str) -> None:
    units = entry["units"]
    if units[0] != 0 or any(a >= b for a, b in pairwise(units)):
        raise _wrong(f"{where}, 'units'", units, "a list of counts that starts at 0 and rises")
    for name in ("seconds", "spread", "launch", "launch_spread"):
        values = entry.get(name)
        if values is not None and len(values) != len(units):
            raise TableError(f"{where}: {len(values)} values of '{name}' for {len(units)} counts. {REMEDY}")


def _check_totals(record: dict[str, Any], where: str) -> None:
    for whole, fixed in (("whole", "fixed"), ("whole_launch", "fixed_launch")):
        if (record.get(whole) is None) != (record.get(fixed) is None):
            raise TableError(f"{where}: '{whole}' and '{fixed}' go together. {REMEDY}")
        if record.get(whole) is not None and record[fixed] > record[whole]:
            raise TableError(
                f"{where}: '{fixed}' ({record[fixed]:g} s) is more than '{whole}' ({record[whole]:g} s). {REMEDY}"
            )
    with_launch = record.get("whole_launch") is not None
    if any((entry.get("launch") is not None) != with_launch for entry in record["sublayers"]):
        raise TableError(f"{where}: 'launch' is there for some sublayers and not for others. {REMEDY}")


def _integer(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**40


def _seconds(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < LONGEST  # neither NaN nor infinity is in there


def _several(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) > 0 and all(holds(v) for v in value)


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _layer(value: Any) -> bool:
    return isinstance(value, dict) and all(_text(k) and _integer(0)(v) for k, v in value.items())


def _known_dtype(value: Any) -> bool:
    from shearling.engine.precision import DTYPES

    return isinstance(value, str) and value in DTYPES


_TIME = f"seconds: a number from 0 to {LONGEST:g}"
_OPTIONAL = {"runtime", "whole_launch", "fixed_launch", "launch", "launch_spread", "settings"}
_TABLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "device": (_text, "the name of a device"),
    "device_type": (_text, "a kind of device, such as 'cpu'"),
    "model_type": (_text, "a model type, such as 'bert'"),
    "layers": (_several(_layer), "a list of {'heads': ..., 'filters': ...}"),
    "batch_size": (_integer(1), "a batch size"),
    "seq_len": (_integer(1), "a length"),
    "dtype": (_known_dtype, "a dtype, such as 'float32'"),
    "threads": (_integer(1), "a number of threads"),
    "whole": (lambda v: _seconds(v) and v > 0, _TIME + ", and not 0"),
    "fixed": (_seconds, _TIME),
    "whole_launch": (_or_none(_seconds), _TIME),
    "fixed_launch": (_or_none(_seconds), _TIME),
    "runtime": (lambda v: v in RUNTIMES, " or ".join(map(repr, RUNTIMES))),
    "versions": (lambda v: isinstance(v, dict), "an object of versions"),
    "settings": (lambda v: isinstance(v, dict), "an object"),
}
_ENTRY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stack": (_integer(0), "the number of a stack of layers"),
    "kind": (lambda v: v in ("heads", "filters"), "'heads' or 'filters'"),
    "width": (_integer(1), "a width"),
    "hidden_size": (_integer(1), "a hidden size"),
    "weights_per_unit": (_integer(0), "a count of weights"),
    "units": (_several(_integer(0)), "a list of counts"),
    "seconds": (_several(_seconds), "a list of " + _TIME),
    "spread": (_several(_seconds), "a list of " + _TIME),
    "launch": (_or_none(_several(_seconds)), "a list of " + _TIME),
    "launch_spread": (_or_none(_several(_seconds)), "a list of " + _TIME),
}
