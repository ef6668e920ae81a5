"""What is read from disk: JSON of a sane size, and every field that others rely on is what shearling writes there."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from shearling.errors import CheckpointError, ModelError, OutputError, TableError
from shearling.schema.rules import (
    ANYTHING,
    COUNT,
    MAX_SIZE,
    NAME,
    NUMBER,
    OBJECT,
    TEXT,
    Schema,
    integer,
    leaf,
    mapping,
    number,
    one_of,
    or_none,
    record,
    several,
    shown,
)  # fmt: skip

MAX_LAYERS = 1024
MAX_LABELS = 2**20
LONGEST = 3600.0  # seconds; one forward pass does not take an hour
KINDS = ("flops", "params", "latency")
DTYPES = ("float32", "float64", "bfloat16", "float16")
RUNTIMES = ("eager", "graphs")

# shearling.json

_COST = record(dict.fromkeys(("dense", "pruned", "ratio"), NUMBER))
_EXAM = {"task": TEXT, "metric": TEXT, "examples": COUNT}
_SCORE = record({**_EXAM, "value": NUMBER}, {"em": NUMBER, "dense": or_none(NUMBER)})
_TIMING = record(
    {"device": TEXT},
    {
        "predicted": or_none(NUMBER), "layer_time": several(NUMBER),
        "measured": or_none(number("a ratio above 0", 0)), "batch_size": COUNT, "seq_len": COUNT, "dtype": TEXT,
        "corrections": COUNT, "threads": COUNT, "dense_ms": NUMBER, "pruned_ms": NUMBER,
    },
)  # fmt: skip


def _alike(value: dict[str, Any]) -> str | None:
    return None if len(value["layers"]) == len(value["dense_layers"]) else ": layers and dense_layers differ in length"


RECORD = Schema(
    "record",
    record(
        {
            "method": TEXT,
            "model_type": TEXT,
            "constraint": mapping(NUMBER, one_of(KINDS)),
            "sample": record({"examples": COUNT, "mean_length": NUMBER, "fingerprint": TEXT}),
            **dict.fromkeys(("flops", "params", "flops_model", "params_model"), _COST),
            **dict.fromkeys(("layers", "dense_layers"), several(mapping(COUNT))),
            "seconds": mapping(NUMBER),
            "warnings": several(TEXT),
            "repairs": several(
                record({"sublayer": TEXT, "note": TEXT}, {"before": NUMBER, "after": NUMBER, "used": ANYTHING})
            ),
        },
        {
            "format": COUNT,
            "settings": OBJECT,
            "check": or_none(NUMBER),
            "base": or_none(TEXT),
            "architecture": TEXT,
            "auto_class": TEXT,
            "retrained": record(
                {}, dict.fromkeys(("before", "after"), or_none(record({"metric": TEXT, "value": NUMBER})))
            ),
            "seed": integer("a seed", -(2**63), 2**64),
            "versions": mapping(TEXT),
            "card": OBJECT,
            "evaluations": several(_SCORE),
            "evaluation": record({**_EXAM, "dense": NUMBER, "pruned": NUMBER}, {"em": NUMBER}),
            "max_drop": record({"metric": TEXT, "dense": NUMBER, "value": NUMBER, "examples": COUNT}),
            "agreement": record({"kind": TEXT, "value": NUMBER, "examples": COUNT}),
            "polish": record(
                {}, {**dict.fromkeys(("before", "after", "seconds"), NUMBER), "passes": COUNT, "examples": COUNT}
            ),
            "samples": record({"used": COUNT}, {"given": COUNT, "why": TEXT}),
            **dict.fromkeys(("latency", "timing"), _TIMING),
        },
        also=_alike,
    ),
    CheckpointError,
    "It was changed.",
)  # fmt: skip

# Latency tables

_TIME = number(f"seconds: a number from 0 to {LONGEST:g}", -1e-300, LONGEST)
_TIMES = several(_TIME, least=1)
_BIG = 2**40


def _entry(value: dict[str, Any]) -> str | None:
    units = value["units"]
    if units[0] != 0 or any(a >= b for a, b in pairwise(units)):
        return f".units: {shown(units)} is not a list of counts that starts at 0 and rises"
    for name in ("seconds", "spread", "launch", "launch_spread"):
        if value.get(name) and len(value[name]) != len(units):
            return f": {len(value[name])} values of '{name}' for {len(units)} counts"
    return None


def _totals(value: dict[str, Any]) -> str | None:
    for whole, fixed in (("whole", "fixed"), ("whole_launch", "fixed_launch")):
        if (value.get(whole) is None) != (value.get(fixed) is None):
            return f": '{whole}' and '{fixed}' go together"
        if value.get(whole) is not None and value[fixed] > value[whole]:
            return f": '{fixed}' ({value[fixed]:g} s) is more than '{whole}' ({value[whole]:g} s)"
    with_launch = value.get("whole_launch") is not None
    if any((entry.get("launch") is not None) != with_launch for entry in value["sublayers"]):
        return ": 'launch' is there for some sublayers and not for others"
    return None


_ENTRY = record(
    {
        "stack": integer("the number of a stack of layers", 0, _BIG),
        "kind": one_of(("heads", "filters")),
        "width": integer("a width", 1, _BIG),
        "hidden_size": integer("a hidden size", 1, _BIG),
        "weights_per_unit": integer("a count of weights", 0, _BIG),
        "units": several(integer("a count", 0, _BIG), least=1),
        **dict.fromkeys(("seconds", "spread"), _TIMES),
    },
    dict.fromkeys(("launch", "launch_spread"), or_none(_TIMES)),
    closed=True,
    also=_entry,
)
TABLE = Schema(
    "latency table",
    record(
        {
            "format": leaf(lambda value: value == 1, "1, the format that this version reads"),
            **dict.fromkeys(("device", "device_type", "model_type"), NAME),
            "layers": several(mapping(integer("a count", 0, _BIG), NAME), least=1),
            **dict.fromkeys(("batch_size", "seq_len", "threads"), integer("a whole number above 0", 1, _BIG)),
            "dtype": one_of(DTYPES),
            "whole": number(f"seconds: a number above 0, to {LONGEST:g}", 0, LONGEST),
            "fixed": _TIME,
            "sublayers": several(_ENTRY, least=1),
            "versions": OBJECT,
        },
        {
            "runtime": one_of(RUNTIMES),
            "settings": OBJECT,
            **dict.fromkeys(("whole_launch", "fixed_launch"), or_none(_TIME)),
        },
        closed=True,
        also=_totals,
    ),
    TableError,
    "Measure it again with `shearling profile`.",
)  # fmt: skip

# config.json, and the index of weights in several files

# Names of sizes and counts: what transformers allocates or loops over. Other numbers (rope_theta) may be any size.
SIZED = re.compile(r"size|dim|num_|^n_|^d_|layer|head|label|vocab|position|channel|expert|depth|block|width|kernel")
_PAIR = several(COUNT, least=2, most=2)
_PICK = record(
    {
        "argument": TEXT,
        "heads": several(COUNT),
        "made_by": leaf(lambda value: isinstance(value, str) and (not value or value.isidentifier()), "a name"),
        "returned": integer("a position", -1, 7),
    },
    closed=True,
)
_EDITS = record(
    {
        "linear": mapping(_PAIR),
        "attributes": mapping(COUNT),
        "bias_only": several(TEXT),
        "hollow": mapping(
            leaf(lambda v: isinstance(v, list) and len(v) == 2 and TEXT(v[0]) is COUNT(v[1]) is None, "name and count")
        ),
    },
    {"picks": mapping(_PICK)},
)  # fmt: skip


def _sizes(value: Any, name: str = "") -> str | None:
    """No size may keep transformers busy for ever before it sees that the weights do not fit."""
    if isinstance(value, dict):
        return next((f".{k}{found}" for k, v in value.items() if (found := _sizes(v, k)) is not None), None)
    if isinstance(value, list):
        return next((found for v in value if (found := _sizes(v, name)) is not None), None)
    if not isinstance(value, int) or not SIZED.search(name):
        return None
    most = MAX_LAYERS if "layer" in name else MAX_LABELS if name == "num_labels" else MAX_SIZE
    return None if abs(value) <= most else f": {shown(value)} is more than {most}"


CONFIG = Schema("configuration", mapping(ANYTHING), CheckpointError, "It was changed.")
PRUNED_CONFIG = Schema(
    "configuration",
    record(
        {"quantization_config": record({"quant_method": one_of(("shearling",)), "edits": _EDITS})},
        also=lambda value: _sizes({name: one for name, one in value.items() if name != "quantization_config"}),
    ),
    CheckpointError,
    "It was changed.",
)
INDEX = Schema(
    "index of weights",
    record({
        "weight_map": mapping(leaf(
            lambda name: isinstance(name, str) and name not in ("", "..") and name == Path(name).name,
            "a file of the directory",
        ))
    }),
    CheckpointError,
    "It was changed.",
)  # fmt: skip

# modules.json of sentence-transformers, saved measurements, sweeps

_INSIDE = leaf(
    lambda value: isinstance(value, str) and not Path(value).is_absolute() and ".." not in Path(value).parts,
    "a path inside the directory: it leads out of the directory",
)
MODULES = Schema(
    "list of modules",
    several(record({}, {"path": _INSIDE, "type": TEXT})),
    ModelError,
    "Save the model again with sentence-transformers.",
)
PLAN = Schema(
    "plan",
    record({
        "sizes": several(mapping(COUNT)),
        "lengths": several(NUMBER),
        "seed": integer("a seed", 0, 2**63),
        "seconds": mapping(NUMBER),
        "fingerprint": TEXT,
        "warnings": several(TEXT),
        "examples": integer("a count", 0, _BIG),
        "method": TEXT,
        "settings": OBJECT,
    }),
    CheckpointError,
    "Measure again.",
)  # fmt: skip
_SCORED = {"value": NUMBER, "seconds": NUMBER}
_FRESH = "Choose another place, or start afresh with force (--force, force=True)."
SWEEP = Schema(
    "sweep",
    record({"settings": record({"methods": mapping(OBJECT)}), "dense": or_none(record(_SCORED))}),
    OutputError,
    _FRESH,
)
RESULTS = Schema(
    "list of results",
    several(record({"method": TEXT, "constraint": mapping(NUMBER), "seed": integer("a seed", 0, 2**63), **_SCORED})),
    OutputError,
    _FRESH,
)
