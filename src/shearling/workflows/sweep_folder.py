"""The folder of a sweep: settings and points, written as soon as they are known."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shearling import schema
from shearling.costs import KINDS, weight_bytes
from shearling.engine.distributed import on_first
from shearling.errors import OutputError
from shearling.files import RECORD, SWEEP, check_folder, json_text, write_whole
from shearling.report.facts import notes_of
from shearling.workflows.grid import Key, Outcome, key

SETTINGS, RESULTS = SWEEP
CURVE, PAGE, MODELS = "curve.svg", "report.html", "models"
FORMAT = 1
# Settings that may grow when a sweep is resumed; all others must be unchanged.
GROWS = ("methods",)


class Store:
    """Opens or creates the folder; `results` is the content of results.json."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, force: bool = False) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {"format": FORMAT, "settings": dict(settings), "dense": None}
        self.results: list[dict[str, Any]] = []
        check_folder(folder)
        if force:
            on_first(self._forget)
        if (folder / SETTINGS).is_file():
            self._go_on(settings)
        elif folder.is_dir() and any(folder.iterdir()):
            raise OutputError(f"{folder} is not empty and holds no sweep; choose another place.")
        self.write()

    def done(self, *, saved: bool) -> set[Key]:
        """The points that need not be computed again; with `saved`, only those whose model exists."""
        there = [row for row in self.results if "model" in row and (self.folder / row["model"]).is_dir()]
        return {_key(row) for row in (there if saved else self.results)}

    def add(self, outcome: Outcome, *, saved: Path | None = None) -> None:
        """Add a point, replacing an earlier result of the same point."""
        row = record_of(outcome, self.facts["dense"]["value"])
        row |= {"model": str(saved.relative_to(self.folder))} if saved else {}
        numbers = {_key(one): number for number, one in enumerate(self.results)}
        at = numbers.get(outcome.key, len(self.results))
        self.results[at : at + 1] = [row]
        self.write()

    def write(self) -> None:
        """Write both files atomically."""
        contents = {SETTINGS: self.facts, RESULTS: self.results}
        write_all({self.folder / name: json_text(content) for name, content in contents.items()})

    def _forget(self) -> None:
        """Remove only files that a sweep writes."""
        if (self.folder / SETTINGS).is_file():
            for name in (RESULTS, CURVE, PAGE, SETTINGS):
                (self.folder / name).unlink(missing_ok=True)
            for record in (self.folder / MODELS).glob(f"*/{RECORD}"):
                shutil.rmtree(record.parent, ignore_errors=True)

    def _go_on(self, settings: Mapping[str, Any]) -> None:
        facts, self.results = schema.SWEEP.read(self.folder / SETTINGS), schema.RESULTS.read(self.folder / RESULTS)
        self.facts["dense"], before = facts["dense"], facts["settings"]
        changed = [n for n in sorted({*before, *settings} - {*GROWS}) if before.get(n) != settings.get(n)]
        both = before["methods"].keys() & settings["methods"].keys()
        changed += [f"methods.{m}" for m in sorted(both) if before["methods"][m] != settings["methods"][m]]
        if changed:
            listed = ", ".join(f"{name} {_short(before, name)} (now {_short(settings, name)})" for name in changed)
            raise OutputError(
                f"{self.folder} has a sweep with other settings: {listed}. Give the same settings to resume it, choose "
                "another place, or start afresh with force (--force, force=True)."
            )
        self.facts["settings"]["methods"] = before["methods"] | settings["methods"]


def record_of(outcome: Outcome, dense: float) -> dict[str, Any]:
    """A point as an entry of results.json."""
    pruned, score = outcome.pruned, outcome.score
    if pruned is None or score is None:
        raise ValueError("a point without a model has no record")
    report = pruned.report.to_json()
    reached = {"flops": report["flops"]["ratio"], "params": report["params"]["ratio"]}
    latency = report.get("latency")
    timing = latency or report.get("timing")
    return {
        "method": outcome.method,
        **{kind: outcome.constraint.get(kind, reached.get(kind)) for kind in KINDS if kind != "latency" or latency},
        "metric": score.metric,
        "value": round(score.value, 4),
        "seconds": report["seconds"]["total"],
        "seed": outcome.seed,
        "constraint": dict(outcome.constraint),
        "dense": dense,
        "reached": reached,
        "examples": report["sample"]["examples"],
        "stages": {name: seconds for name, seconds in report["seconds"].items() if name != "total"},
        "evaluate_seconds": score.seconds,
        "layers": report["layers"],
        "megabytes": weight_bytes(pruned.model) / 1e6,
        "notes": notes_of(report),
        **({"agreement": report["agreement"]} if "agreement" in report else {}),
        **({"flipped": pruned.flipped} if pruned.flipped else {}),
        **({"em": round(score.em, 4)} if score.em is not None else {}),
        **({"timing": timing} if timing else {}),
    }


def write_all(texts: Mapping[Path, str]) -> None:
    """Write files atomically, on one process."""

    def write() -> None:
        for path, text in texts.items():
            write_whole(path, text)

    on_first(write)


def _key(row: Mapping[str, Any]) -> Key:
    return key(row["method"], row["constraint"], row["seed"])


def _short(settings: Mapping[str, Any], name: str) -> str:
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    text = str(value)
    return text[:12] + "…" if len(text) > 40 else text
