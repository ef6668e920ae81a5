"""The content of reports: rows derived from a record, rendered by terminal, page and model card."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shearling.latency.table import RESTLESS

KINDS = {"flops": "FLOPs", "params": "parameters", "latency": "latency"}
COSTS = {
    "flops": "FLOPs, layers",
    "flops_model": "FLOPs, whole model",
    "params": "parameters, layers",
    "params_model": "parameters, whole model",
}
SMALL = ("FLOPs, whole model", "parameters, layers", "parameters", "FLOPs, one example")  # rows without a card
UNKNOWN = "not measured"
FOOTNOTE = "FLOPs are counted as multiply-accumulates (MACs) of one example of the sample's mean length."
AGREEMENT = {
    "equal": "predictions that are equal",
    "cosine": "mean cosine of the embeddings",
    "spearman": "Spearman correlation of the outputs",
    "perplexity": "perplexity, pruned over dense",
}
PROPORTIONS = ("accuracy", "em", "exact match", "r@1")  # proportions of correct examples
CORRELATIONS = ("spearman", "pearson")


class Row(NamedTuple):
    """One line of the comparison between dense and pruned, formatted."""

    name: str
    dense: str
    pruned: str
    change: str
    note: str = ""


class Card(NamedTuple):
    """A headline figure with its name and a caption."""

    name: str
    number: str
    below: str = ""


class Layer(NamedTuple):
    """One layer: (left, total) units by kind, and its share of the dense model's time if known."""

    depth: int
    units: dict[str, tuple[int, int]]
    time: float | None = None


@dataclass(frozen=True)
class Facts:
    """The content of a report about one model, or two side by side.

    origin  where the model comes from and how it was made
    """

    title: str
    columns: tuple[str, str] = ("dense", "pruned")
    cards: Sequence[Card] = ()
    rows: Sequence[Row] = ()
    layers: Sequence[Layer] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def facts_of(record: Mapping[str, Any]) -> Facts:
    """The facts of a record: `shearling.json`, or what `prune --json` prints."""
    rows = [*map(_score_row, scores_of(record)), *agreement_rows(record.get("agreement"))]
    rows += _timing_rows(record.get("timing") or record.get("latency"))
    for key, name in COSTS.items():
        cost = record[key]
        rows.append(Row(name, short(cost["dense"]), short(cost["pruned"]), f"{cost['ratio']:.1%}"))
    seconds = sum(spent for name, spent in record["seconds"].items() if name != "total")
    took = Card("time to prune", f"{seconds:.1f} s", count(record["sample"]["examples"], "example"))
    return Facts(
        title_of(record),
        cards=[*(card_of(row) for row in rows if row.name not in SMALL), took],
        rows=rows,
        layers=layers_of(
            record["layers"],
            record["dense_layers"],
            (record.get("latency") or record.get("timing") or {}).get("layer_time"),
        ),
        origin=_origin(record),
        notes=notes_of(record),
    )


def facts_of_comparison(found: Mapping[str, Any]) -> Facts:
    """The facts of two models side by side, from what `compare --json` prints."""
    a, b = found["models"]
    names = tuple(str(side["model"]).rstrip("/").rpartition("/")[2] for side in (a, b))
    rows = []
    if a["value"] is not None and b["value"] is not None:
        score = {"task": found["task"], "metric": found["metric"], "examples": found["examples"]}
        rows.append(_score_row(score | {"dense": a["value"], "value": b["value"]}))
    alike = found["agreement"]
    agreement = agreement_rows(
        alike and {"kind": alike["measure"], "value": alike["value"], "examples": alike["count"]}
    )
    shape = " x ".join(map(str, found["batch"]))
    doubt = busy(max(side.get("spread", 0.0) / side["milliseconds"] for side in (a, b)))
    rows += [
        *agreement,
        Row(f"latency, {shape}", f"{a['milliseconds']:.2f} ms", f"{b['milliseconds']:.2f} ms",
            faster(b["milliseconds"] / a["milliseconds"]),
            "; ".join(filter(None, [f"in turns on {found['device']}", doubt]))),
        Row("size on disk", f"{a['bytes'] / 1e6:.1f} MB", f"{b['bytes'] / 1e6:.1f} MB", _share(b["bytes"], a["bytes"])),
        Row("parameters", short(a["params"]), short(b["params"]), _share(b["params"], a["params"])),
        Row("FLOPs, one example", short(a["macs"]), short(b["macs"]), _share(b["macs"], a["macs"])),
    ]  # fmt: skip
    notes = [] if alike else ["no agreement: the two do not read the same tokens, or give different outputs"]
    cards = [card_of(row) for row in rows if row.name not in SMALL]
    return Facts(f"{names[0]} and {names[1]}", (names[0], names[1]), cards, rows, notes=notes)


def facts_of_score(found: Mapping[str, Any], model: str) -> Facts:
    """The facts of one score, from what `evaluate --json` prints."""
    name = model.rstrip("/").rpartition("/")[2]
    row = _score_row(found)
    if found.get("dense") is None:
        row = row._replace(dense="")
    return Facts(f"{name} on {found['task']}", ("dense" if row.dense else "", name), rows=[row])


def card_of(row: Row) -> Card:
    """A row as a headline figure."""
    if row.name.startswith("latency") and row.change:
        return Card("speed, measured", row.change, row.name.removeprefix("latency, "))
    unit = row.pruned.rpartition(" ")[1:]  # written once if both have it
    dense = row.dense.removesuffix("".join(unit)) if unit[0] else row.dense
    number = row.pruned if row.dense in ("", UNKNOWN) else f"{dense} → {row.pruned}"
    return Card(row.name, number, row.note or f"{row.change} of dense")


def title_of(record: Mapping[str, Any]) -> str:
    """`bert-base-uncased, pruned to 50% of its FLOPs`, and whether it was retrained."""
    base = str(record.get("base") or record["model_type"]).rstrip("/").rpartition("/")[2]
    return f"{base}, pruned to {constraint_of(record)}" + (" and retrained" if record.get("retrained") else "")


def constraint_of(record: Mapping[str, Any], of: str = " of its ") -> str:
    """`50% of its FLOPs and 60% of its parameters`."""
    return " and ".join(f"{100 * ratio:.4g}%{of}{KINDS.get(k, k)}" for k, ratio in record["constraint"].items())


def scores_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The latest score of the pruned model per task: {task, metric, value, examples}, optionally dense and em."""
    found = {one["task"]: dict(one) for one in record.get("evaluations") or ()}
    here = record.get("evaluation")
    if here and here["task"] not in found:
        found[here["task"]] = {**here, "value": here["pruned"]}
    drop = record.get("max_drop")
    if drop and not found:
        found[""] = {"task": "", **{name: drop[name] for name in ("metric", "dense", "value", "examples")}}
    return list(found.values())


def interval(metric: str, value: float, examples: int) -> tuple[float, float] | None:
    """95% confidence interval of a score in points; None for metrics without a simple one.

    Wilson's interval for proportions, Fisher's z for correlations.
    """
    if metric in PROPORTIONS and examples > 0 and 0 <= value <= 100:
        share, z = value / 100, 1.96
        middle = (share + z * z / (2 * examples)) / (1 + z * z / examples)
        half = z * math.sqrt(share * (1 - share) / examples + z * z / (4 * examples**2)) / (1 + z * z / examples)
        return 100 * (middle - half), 100 * (middle + half)
    if metric in CORRELATIONS and examples > 3 and -100 < value < 100:
        z, half = math.atanh(value / 100), 1.96 / math.sqrt(examples - 3)
        return 100 * math.tanh(z - half), 100 * math.tanh(z + half)
    return None


def notes_of(record: Mapping[str, Any]) -> list[str]:
    """Warnings without duplicates; those about sublayers grouped, without sublayers that lost no unit."""
    remarks: dict[str, list[str]] = {}
    repairs = record.get("repairs") or []
    times = Counter(repair["sublayer"] for repair in repairs)  # encoder and decoder may share names
    for repair in repairs:
        if repair["note"] and (times[repair["sublayer"]] > 1 or not _untouched(repair["sublayer"], record)):
            remarks.setdefault(repair["note"], []).append(repair["sublayer"])
    gathered = [
        f"{where[0]}: {note}" if len(where) == 1 else f"in {len(where)} of {len(repairs)} sublayers, {note}"
        for note, where in remarks.items()
    ]
    return list(dict.fromkeys([*(record.get("warnings") or ()), *gathered]))


def layers_of(
    layers: Sequence[Mapping[str, int]], dense: Sequence[Mapping[str, int]], time: Sequence[float] | None = None
) -> list[Layer]:
    """The units of every layer."""
    shares = list(time) if isinstance(time, list) and len(time) == len(dense) else [None] * len(dense)
    return [
        Layer(depth, {kind: (now.get(kind, 0), total) for kind, total in before.items()}, share)
        for depth, (now, before, share) in enumerate(zip(layers, dense, shares, strict=True))
    ]


def kinds_of(layers: Sequence[Layer]) -> list[str]:
    """The kinds of units that the layers have, in order."""
    return list(dict.fromkeys(kind for layer in layers for kind in layer.units))


def loading(directory: str, record: Mapping[str, Any]) -> str:
    """Code for loading a pruned model, with shearling and with transformers."""
    name = record.get("auto_class") or record.get("architecture")
    if record.get("shape") == "stock" and name is not None:
        return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("{directory}")'
    ours = f'import shearling\n\nmodel = shearling.load("{directory}")'
    if name is None:
        return ours
    known = f'from transformers import {name}\n\nmodel = {name}.from_pretrained("{directory}")'
    return f"{ours}\n\n# or, after `import shearling`, like any other model\n{known}"


def short(value: float) -> str:
    """1234567 -> 1.23M."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.4g}"


def busy(spread: float) -> str:
    """A warning if timings varied too much; `spread` is half their interquartile range over the median."""
    return f"not to be trusted: the machine is busy (± {spread:.0%})" if spread > RESTLESS else ""


def faster(ratio: float) -> str:
    """A ratio of times as a speed-up."""
    return f"{1 / ratio:.2f}x faster" if ratio <= 1 else f"{ratio:.2f}x slower"


def count(number: float, word: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number:,.10g} {word}" + ("" if number == 1 else "es" if word.endswith("s") else "s")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _score_row(score: Mapping[str, Any]) -> Row:
    value, dense = score["value"], score.get("dense")
    around = interval(score["metric"], value, score["examples"])
    note = f"{score['examples']:,} examples" + (f", 95% interval {around[0]:.1f} to {around[1]:.1f}" if around else "")
    if "em" in score:
        note += f", exact match {score['em']:.2f}"
    name = score["metric"] + (f", {score['task']}" if score["task"] else "")
    if dense is None:
        return Row(name, UNKNOWN, f"{value:.2f}", "", note)
    return Row(name, f"{dense:.2f}", f"{value:.2f}", f"{value - dense:+.2f}", note)


def agreement_rows(found: Mapping[str, Any] | None) -> list[Row]:
    """The record's `agreement` as a row, if there is one."""
    if not found:
        return []
    shown = f"{found['value']:.3f}" if found["kind"] == "perplexity" else f"{found['value']:.2f}%"
    what = AGREEMENT.get(found["kind"], found["kind"])
    return [Row("agreement with dense", "", shown, "", f"{what}, {count(found['examples'], 'example')}")]


def _timing_rows(timing: Mapping[str, Any] | None) -> list[Row]:
    """Measured latency, with the prediction and conditions as a note."""
    if not timing:
        return []
    measured, predicted = timing.get("measured"), timing.get("predicted")
    details = [] if predicted is None else [f"predicted {predicted:.3f}"]
    if "batch_size" in timing and "seq_len" in timing:
        details.append(f"batch {timing['batch_size']}, length {timing['seq_len']}")
    details += [timing["dtype"]] if "dtype" in timing else []
    details += [count(timing["threads"], "thread")] if timing.get("threads") else []
    details += filter(None, [busy(timing.get("spread", 0.0))])
    if timing.get("corrections"):
        details.append(f"the table was corrected {'once' if timing['corrections'] == 1 else 'twice'}")
    name, note = f"latency, {timing['device']}", "; ".join(details)
    if measured is None:
        return [Row(name, "1", UNKNOWN, "", note)]
    if "dense_ms" in timing and "pruned_ms" in timing:
        return [Row(name, f"{timing['dense_ms']:.1f} ms", f"{timing['pruned_ms']:.1f} ms", faster(measured), note)]
    return [Row(name, "1", f"{measured:.3f}", faster(measured), note)]


def _origin(record: Mapping[str, Any]) -> dict[str, str]:
    """Where the model comes from and how it was made, by name."""
    sample, used, polish = record["sample"], record.get("samples"), record.get("polish")
    labelled = record.get("settings", {}).get("labels") or record.get("retrained")
    origin = {
        "pruned from": record.get("base"),
        "method": record["method"] + (", label-free" if record["method"] == "surgeon" and not labelled else ""),
        "constraint": constraint_of(record),
        "shape": record.get("stock") and _stock(record["stock"]),
        "sample": f"{count(sample['examples'], 'example')}, {sample['mean_length']:.0f} tokens on average, seed "
        f"{record.get('seed')}, sha256 {str(sample['fingerprint'])[:16]}",
        "examples": used
        and f"{used['used']:,} of {used.get('given', used['used']):,}"
        + (f": {used['why']}" if used.get("why") else ""),
        "polish": polish and _polish(polish),
        "retraining": record.get("retrained") and retraining_of(record["retrained"]),
        "seconds": "  ".join(f"{name} {seconds:.2f}" for name, seconds in record["seconds"].items()),
        "made with": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
    }
    return {name: str(words) for name, words in origin.items() if words}


def _stock(found: Mapping[str, Any]) -> str:
    """`stock: 4 layers with 12 of 12 heads, 440 of 1536 filters; ...`, with the loss beside that of uneven shapes."""
    sizes = ", ".join(f"{dial['count']} of {dial['dense']} {dial['kind']}" for dial in found["dials"])
    uneven = found["uneven_loss"]
    beside = "" if uneven is None else f" ({uneven:.2g} with uneven layers of the same cost)"
    depth = count(sum(map(len, found["layers"])), "layer")
    return f"stock: {depth} with {sizes}; measured loss {found['loss']:.2g} nats per example{beside}"


def _polish(found: Mapping[str, Any]) -> str:
    if not found.get("passes"):
        return str(found.get("why", "none"))
    details = [count(found["passes"], "pass")]
    if "examples" in found:
        own = f" and {count(found['own'], 'text')} of its own" if found.get("own") else ""
        details.append(f"over {count(found['examples'], 'example')}{own}")
    if "before" in found and "after" in found:
        details.append(f"judge {found['before']:.4g} -> {found['after']:.4g}")
    details += [f"{found['seconds']:.1f} s"] if "seconds" in found else []
    return ", ".join([*details, *filter(None, [found.get("why")])])


def retraining_of(found: Mapping[str, Any]) -> str:
    """`3 epochs over 67,349 examples of sst2, with a teacher; accuracy 80.05 -> 86.70`."""

    def number(name: str) -> str:
        value = found.get(name)
        return f"{value:,.10g}" if isinstance(value, (int, float)) else str(value)

    words = f"{number('epochs')} epochs over {number('examples')} examples of {found.get('task')}"
    words += ", with a teacher" if found.get("teacher") else ""
    before, after = found.get("before"), found.get("after")
    return words + (f"; {after['metric']} {before['value']:.2f} -> {after['value']:.2f}" if before and after else "")


def _untouched(sublayer: str, record: Mapping[str, Any]) -> bool:
    """Whether a sublayer, given by name (`heads of layer 3`), has all its units."""
    found = re.fullmatch(r"(\w+) of layer (\d+)", sublayer)
    if found is None or int(found[2]) >= len(record["layers"]):
        return False
    kind, depth = found[1], int(found[2])
    total = record["dense_layers"][depth].get(kind)
    return total is not None and record["layers"][depth].get(kind) == total
