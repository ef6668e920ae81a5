"""Schemas of the JSON files that are read from disk; every field that other code relies on is checked."""

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
    each,
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
LONGEST = 3600.0  # seconds of one forward pass
KINDS = ("flops", "params", "latency")
SHAPES = ("uneven", "stock")
DTYPES = ("float32", "float64", "bfloat16", "float16")
RUNTIMES = ("eager", "graphs")

# shearling.json

_EXAM = {"task": TEXT, "metric": TEXT, "examples": COUNT}
_TIMING = record({
    "device": TEXT, "measured?": or_none(number("a ratio above 0", 0)), "layer_time?": several(NUMBER), "dtype?": TEXT,
    "predicted?": or_none(NUMBER), **each("dense_ms? pruned_ms? spread?", NUMBER),
    **each("batch_size? seq_len? corrections? threads?", COUNT),
})  # fmt: skip


FORMAT = leaf(lambda value: value == 1, "1, the format that this version reads")
RECORD = Schema(
    "record",
    record(
        {
            **each("method model_type architecture? auto_class?", TEXT),
            "constraint": mapping(NUMBER, one_of(KINDS)),
            "sample": record({"examples": COUNT, "mean_length": NUMBER, "fingerprint": TEXT}),
            **each("flops params flops_model params_model", record(each("dense pruned ratio", NUMBER))),
            **each("layers dense_layers", several(mapping(COUNT))),
            "seconds": mapping(NUMBER),
            "warnings": several(TEXT),
            "repairs": several(record({**each("sublayer note", TEXT), **each("before? after?", NUMBER)})),
            "format?": FORMAT,
            **each("settings? card?", OBJECT),
            "check?": or_none(NUMBER),
            "base?": or_none(TEXT),
            "seed?": integer("a seed", -(2**63), 2**64),
            "versions?": mapping(TEXT),
            "retrained?": record(each("before? after?", or_none(record({"metric": TEXT, "value": NUMBER})))),
            "evaluations?": several(record({**_EXAM, "value": NUMBER, "em?": NUMBER, "dense?": or_none(NUMBER)})),
            "evaluation?": record({**_EXAM, **each("dense pruned em?", NUMBER)}),
            "max_drop?": record({"metric": TEXT, "examples": COUNT, **each("dense value", NUMBER)}),
            "agreement?": record({"kind": TEXT, "value": NUMBER, "examples": COUNT}),
            "polish?": record(
                {**each("before? after? seconds?", NUMBER), **each("passes? examples? own?", COUNT), "why?": TEXT}
            ),
            "shape?": one_of(SHAPES),
            "stock?": record(
                {
                    "layers": several(several(COUNT)),
                    "loss": NUMBER,
                    "uneven_loss": or_none(NUMBER),
                    "dials": several(record({"kind": TEXT, **each("count dense", COUNT)})),
                }
            ),
            "samples?": record({"used": COUNT, "given?": COUNT, "why?": TEXT}),
            **each("latency? timing?", _TIMING),
            "exports?": several(
                record({**each("out format precision runtime", TEXT), "bytes": NUMBER, "agreement?": or_none(NUMBER)})
            ),
            "tokenizer?": leaf(lambda value: isinstance(value, bool), "true or false"),
        },
        also=lambda value: (
            None if len(value["layers"]) == len(value["dense_layers"]) else ": layers and dense_layers differ in length"
        ),
    ),
    CheckpointError,
    "It was changed.",
)

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
        **each("stack weights_per_unit", integer("a count", 0, _BIG)),
        "kind": one_of(("heads", "filters")),
        **each("width hidden_size", integer("a size", 1, _BIG)),
        "units": several(integer("a count", 0, _BIG), least=1),
        **each("seconds spread", _TIMES),
        **each("launch? launch_spread?", or_none(_TIMES)),
    },
    closed=True,
    also=_entry,
)
TABLE = Schema(
    "latency table",
    record(
        {
            "format": FORMAT,
            **each("device device_type model_type", NAME),
            "layers": several(mapping(integer("a count", 0, _BIG), NAME), least=1),
            **each("batch_size seq_len threads", integer("a whole number above 0", 1, _BIG)),
            "dtype": one_of(DTYPES),
            "whole": number(f"seconds: a number above 0, to {LONGEST:g}", 0, LONGEST),
            "fixed": _TIME,
            **each("whole_launch? fixed_launch?", or_none(_TIME)),
            "sublayers": several(_ENTRY, least=1),
            "runtime?": one_of(RUNTIMES),
            **each("versions settings?", OBJECT),
        },
        closed=True,
        also=_totals,
    ),
    TableError,
    "Measure it again with `shearling profile`.",
)

# config.json, and the index of weights in several files

# Fields that transformers allocates by or loops over. Other numbers (rope_theta) are not bounded.
SIZED = re.compile(r"size|dim|num_|^n_|^d_|layer|head|label|vocab|position|channel|expert|depth|block|width|kernel")
DEPTH = re.compile(r"(^|_)layers?$|^depth$")
NO_SIZES = ("shearling", "label2id", "id2label")  # keys are module or label names; the first has its own schema
_IDENTIFIER = leaf(lambda value: isinstance(value, str) and (not value or value.isidentifier()), "a name")
_HOLLOW = leaf(lambda v: isinstance(v, list) and len(v) == 2 and TEXT(v[0]) is COUNT(v[1]) is None, "name and count")
_PICK = {"argument": TEXT, "heads": several(COUNT), "made_by": _IDENTIFIER, "returned": integer("a position", -1, 7)}
_EDITS = record({
    "linear": mapping(several(COUNT, least=2, most=2)),
    "attributes": mapping(COUNT),
    "bias_only": several(TEXT),
    "hollow": mapping(_HOLLOW),
    "picks?": mapping(record(_PICK, closed=True)),
    "dropped?": several(TEXT),
    "parameters?": mapping(several(COUNT, least=2, most=2)),
})  # fmt: skip


def _sizes(value: Any, name: str = "") -> str | None:
    """Reject sizes so large that building the model would take for ever or exhaust the memory."""
    if isinstance(value, dict):
        parts = [(k, v) for k, v in value.items() if k not in NO_SIZES]
        return next((f".{k}{found}" for k, v in parts if (found := _sizes(v, k)) is not None), None)
    if isinstance(value, list):
        return next((found for v in value if (found := _sizes(v, name)) is not None), None)
    if not isinstance(value, int) or not SIZED.search(name):
        return None
    most = MAX_LAYERS if DEPTH.search(name) else MAX_LABELS if name == "num_labels" else MAX_SIZE
    return None if abs(value) <= most else f": {shown(value)} is more than {most}"


CONFIG = Schema("configuration", mapping(ANYTHING), CheckpointError, "It was changed.")
DENSE_CONFIG = Schema("configuration", record({}, also=_sizes), ModelError, "Save the model again.")
PRUNED_CONFIG = Schema(
    "configuration",
    record(
        {"shearling": record({"version": COUNT, "edits": _EDITS, "auto_map?": mapping(TEXT)})},
        also=lambda value: _sizes({name: one for name, one in value.items() if name != "shearling"}),
    ),
    CheckpointError,
    "It was changed.",
)
_FILE = leaf(
    lambda name: isinstance(name, str) and name not in ("", "..") and name == Path(name).name, "a file of the directory"
)
INDEX = Schema("index of weights", record({"weight_map": mapping(_FILE)}), CheckpointError, "It was changed.")

# modules.json of sentence-transformers, saved measurements, sweeps

_INSIDE = leaf(
    lambda value: isinstance(value, str) and not Path(value).is_absolute() and ".." not in Path(value).parts,
    "a path inside the directory: it leads out of the directory",
)
MODULES = Schema(
    "list of modules",
    several(record({"path?": _INSIDE, "type?": TEXT})),
    ModelError,
    "Save the model again with sentence-transformers.",
)
SETTINGS = Schema("configuration", OBJECT, ModelError, "Save the model again with sentence-transformers.")
_SEED = integer("a seed", 0, 2**63)
PLAN = Schema(
    "plan",
    record({
        "sizes": several(mapping(COUNT)), "lengths": several(NUMBER), "seed": _SEED, "seconds": mapping(NUMBER),
        "warnings": several(TEXT), "examples": integer("a count", 0, _BIG), "settings": OBJECT,
        **each("fingerprint method weights", TEXT),
    }),
    CheckpointError,
    "Measure again.",
)  # fmt: skip
_FRESH = "Choose another place, or start afresh with force (--force, force=True)."
_SCORED = each("value seconds", NUMBER)
_POINT = record({"method": TEXT, "constraint": mapping(NUMBER), "seed": _SEED, **_SCORED})
_SETTINGS = record({"methods": mapping(OBJECT)})
_SWEEP = record({"format?": FORMAT, "settings": _SETTINGS, "dense": or_none(record(_SCORED))})
SWEEP = Schema("sweep", _SWEEP, OutputError, _FRESH)
RESULTS = Schema("list of results", several(_POINT), OutputError, _FRESH)
