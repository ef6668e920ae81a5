"""The page of one pruned model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shearling.report import parts
from shearling.report.curve import NAMES
from shearling.report.page import page, snippet


def report_page(record: Mapping[str, Any], *, title: str | None = None, directory: str = "DIR") -> str:
    """The page of one pruned model; `record` is its shearling.json or what `prune --json` prints."""
    asked = " and ".join(f"{100 * ratio:.4g}% of its {NAMES[name]}" for name, ratio in record["constraint"].items())
    seconds = {name: s for name, s in record["seconds"].items() if name != "total"}
    big = [
        ("MACs of the layers", f"{record['flops']['ratio']:.1%}", "left of dense"),
        ("parameters of the layers", f"{record['params']['ratio']:.1%}", "left of dense"),
        ("time to prune", f"{sum(seconds.values()):.1f} s", f"{record['sample']['examples']:,} examples"),
    ]
    for score in record.get("evaluations", [])[:2]:
        dense = score.get("dense")
        big.append(
            (f"{score['task']}, {score['metric']}", f"{score['value']:.2f}", f"dense {dense:.2f}" if dense else "")
        )
    timing = record.get("latency")
    retrained = record.get("retrained")
    said = list(record.get("warnings", []))
    said += [f"{r['sublayer']}: {r['note']}" for r in record.get("repairs", []) if r.get("note")]
    settings = {
        "method": record["method"],
        **record.get("settings", {}),
        "constraint": record["constraint"],
        "seed": record.get("seed"),
        "sample": record.get("sample", {}),
        "versions": record.get("versions", {}),
    }
    return page(
        title or f"{record['model_type']}, pruned",
        f"by {record['method']} to {asked}",
        [
            parts.cards(big),
            parts.section("What is left", parts.layer_bars(record["layers"], record["dense_layers"])),
            parts.section("Costs", parts.costs(record)),
            parts.section("Latency", parts.latency([(record["method"], timing)]) if timing else ""),
            parts.section("Time to prune", parts.time_bars([(record["method"], seconds)])),
            parts.section("Retraining", _retraining(retrained) if retrained else ""),
            parts.section("Notes", parts.notes(said)),
            parts.section("Load it", parts.code(snippet(directory, record.get("architecture")))),
            parts.section("Settings", parts.facts(settings)),
        ],
    )


def _retraining(facts: Mapping[str, Any]) -> str:
    """What was trained, and what it brought."""
    shown = {name: facts.get(name) for name in ("task", "examples", "epochs", "lr", "batch_size", "teacher", "steps")}
    for when in ("before", "after"):
        score = facts.get(when)
        if score:
            shown[f"{score['metric']} {when}"] = score["value"]
    return parts.facts(shown | {"loss": facts.get("loss"), "seconds": facts.get("seconds")})
