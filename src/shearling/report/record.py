"""What a pruning run has to say for itself: numbers for machines, a picture for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shearling._version import versions
from shearling.methods import Repaired

FORMAT = 1
BAR = 24


@dataclass(frozen=True)
class Cost:
    """A cost before and after."""

    dense: float
    pruned: float

    @property
    def ratio(self) -> float:
        """Pruned over dense."""
        return self.pruned / self.dense if self.dense else 1.0

    def to_json(self) -> dict[str, float]:
        """The three numbers."""
        return {"dense": self.dense, "pruned": self.pruned, "ratio": self.ratio}


@dataclass(frozen=True)
class Report:
    """The whole record of one run; `to_json` is what `--json` prints and `shearling.json` keeps."""

    method: str
    settings: dict[str, Any]
    constraint: dict[str, float]
    flops: Cost
    params: Cost
    flops_model: Cost
    params_model: Cost
    layers: list[dict[str, int]]
    dense_layers: list[dict[str, int]]
    seconds: dict[str, float]
    seed: int
    examples: int
    mean_length: float
    fingerprint: str
    model_type: str
    given: int = 0
    why: str = ""
    repairs: list[Repaired] = field(default_factory=list)
    check: float | None = None
    warnings: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data, in the names the command line promises."""
        return {
            "format": FORMAT,
            "method": self.method,
            "settings": self.settings,
            "constraint": self.constraint,
            "flops": self.flops.to_json(),
            "params": self.params.to_json(),
            "flops_model": self.flops_model.to_json(),
            "params_model": self.params_model.to_json(),
            "layers": self.layers,
            "dense_layers": self.dense_layers,
            "seconds": self.seconds | {"total": sum(self.seconds.values())},
            "seed": self.seed,
            "sample": {
                "examples": self.examples,
                "mean_length": self.mean_length,
                "fingerprint": self.fingerprint,
                **({"given": self.given} if self.given else {}),
                **({"why": self.why} if self.why else {}),
            },
            "model_type": self.model_type,
            "repairs": [asdict(r) for r in self.repairs],
            "check": self.check,
            "warnings": self.warnings,
            "versions": versions(),
            **self.extra,
        }

    def __str__(self) -> str:
        return describe(self.to_json())


def describe(record: dict[str, Any]) -> str:
    """The picture of a run: a bar per sublayer, costs before and after, seconds per stage."""
    asked = ", ".join(f"{name} {ratio:g}" for name, ratio in record["constraint"].items())
    retrained = record.get("retrained")
    after = ", then retrained" if retrained else ""
    lines = [f"{record['model_type']} pruned by {record['method']} to {asked}{after}", ""]
    lines += layer_bars(record["layers"], record["dense_layers"])
    lines.append("")
    for name, label in (("flops", "MACs, layers"), ("flops_model", "MACs, model")):
        lines.append(_cost_line(label, record[name]))
    for name, label in (("params", "parameters, layers"), ("params_model", "parameters, model")):
        lines.append(_cost_line(label, record[name]))
    latency = record.get("latency")
    if latency:
        lines.append(f"  {'latency':<20}{latency_line(latency)}")
    if retrained:
        lines.append(f"  {'retrained':<20}{retraining_line(retrained)}")
    lines.append("")
    stages = "  ".join(f"{name} {seconds:.2f}" for name, seconds in record["seconds"].items())
    lines.append(f"  seconds: {stages}")
    lines += [f"  note: {warning}" for warning in record["warnings"]]
    lines += [f"  note: {r['sublayer']}: {r['note']}" for r in record["repairs"] if r["note"]]
    return "\n".join(lines)


def latency_line(latency: dict[str, Any]) -> str:
    """Predicted against measured, in words, and where."""
    words = f"predicted {latency['predicted']:.3f} of dense"
    if latency.get("measured") is not None:
        words += f", measured {latency['measured']:.3f} ({1 / latency['measured']:.2f}x faster)"
    words += f" on {latency['device']}"
    if "batch_size" in latency:
        words += f", batch {latency['batch_size']}, length {latency['seq_len']}, {latency['dtype']}"
    if latency.get("corrections"):
        words += f"; the table was corrected {'once' if latency['corrections'] == 1 else 'twice'}"
    return words


def retraining_line(facts: dict[str, Any]) -> str:
    """`3 epochs over 67,349 examples of sst2; accuracy 80.05 -> 86.70`, with the teacher where there was one."""
    epochs, examples = (_number(facts.get(name)) for name in ("epochs", "examples"))
    words = f"{epochs} epochs over {examples} examples of {facts.get('task')}"
    if facts.get("teacher"):
        words += ", with a teacher"
    before, after = facts.get("before"), facts.get("after")
    if before and after:
        words += f"; {after['metric']} {before['value']:.2f} -> {after['value']:.2f}"
    return words


def layer_bars(layers: Sequence[dict[str, int]], dense: Sequence[dict[str, int]]) -> list[str]:
    """`  3  heads ████░░ 7/12   filters ███░░░ 812/3072` for every layer."""
    lines = []
    for depth, (now, before) in enumerate(zip(layers, dense, strict=True)):
        parts = []
        for kind, total in before.items():
            left = now.get(kind, 0)
            full = round(BAR * left / total) if total else 0
            full = max(full, 1) if left else 0
            parts.append(f"{kind} {'█' * full}{'░' * (BAR - full)} {left:>5}/{total:<5}")
        lines.append(f"  {depth:>3}  " + "  ".join(parts))
    return lines


def _number(value: Any) -> str:
    return f"{value:,.10g}" if isinstance(value, (int, float)) else str(value)


def _cost_line(label: str, cost: dict[str, float]) -> str:
    return f"  {label:<20}{short(cost['dense']):>8} -> {short(cost['pruned']):>8}   {cost['ratio']:.1%}"


def short(value: float) -> str:
    """1234567 -> 1.23M."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.4g}"
