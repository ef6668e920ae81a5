"""The record of one run: the content of `--json` and `shearling.json`, and the source of every report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shearling._version import versions
from shearling.methods import Repaired

FORMAT = 1
COSTS = ("flops", "params", "flops_model", "params_model")
SAMPLE = ("examples", "mean_length", "fingerprint")  # fields under "sample" in the JSON
OPTIONAL = (
    "stock", "evaluation", "evaluations", "agreement", "latency", "timing", "polish", "samples", "max_drop", "estimate",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """A cost before and after."""

    dense: float
    pruned: float

    @property
    def ratio(self) -> float:
        """Pruned over dense."""
        return round(self.pruned / self.dense, 12) if self.dense else 1.0  # costs are sums of floats

    def to_json(self) -> dict[str, float]:
        """Both costs and their ratio."""
        return {"dense": self.dense, "pruned": self.pruned, "ratio": self.ratio}


@dataclass(frozen=True, repr=False)
class Report:
    """The record of one run.

    evaluation  {task, metric, dense, pruned, examples}: scores on labelled rows
    agreement   {kind, value, examples}: agreement of the outputs on held-out examples
    latency     predicted and measured ratio, if a latency was asked for
    timing      {device, measured, dense_ms, pruned_ms, ...}: both models timed after the run
    polish      {before, after, passes, seconds, examples, own}: validation loss before and after
    shape       uneven or stock
    stock       {layers, dials, loss, uneven_loss}: kept layers, their common counts, and the measured loss in nats per
                example, beside that of uneven shapes at the same budget
    samples     {used, given, why}: number of examples used out of those given, and the reason
    evaluations  the list that later scores are added to
    max_drop    the search for the smallest model within an allowed loss, with every budget tried
    estimate    memory and time, estimated before the run
    """

    method: str
    settings: dict[str, Any]
    constraint: dict[str, float]
    flops: Cost
    params: Cost
    flops_model: Cost
    params_model: Cost
    layers: list[dict[str, int]]
    dense_layers: list[dict[str, int]]
    seed: int
    examples: int
    mean_length: float
    fingerprint: str
    model_type: str
    seconds: dict[str, float] = field(default_factory=dict)
    repairs: list[Repaired] = field(default_factory=list)
    check: float | None = None
    warnings: list[str] = field(default_factory=list)
    evaluation: dict[str, Any] | None = None
    agreement: dict[str, Any] | None = None
    latency: dict[str, Any] | None = None
    timing: dict[str, Any] | None = None
    polish: dict[str, Any] | None = None
    samples: dict[str, Any] | None = None
    shape: str = "uneven"
    stock: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] | None = None
    max_drop: dict[str, Any] | None = None
    estimate: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data with the documented field names, without values that were not measured."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in OPTIONAL:
            if values[name] is None:
                del values[name]
        return {
            "format": FORMAT,
            **{name: value for name, value in values.items() if name not in SAMPLE},
            **{name: values[name].to_json() for name in COSTS},
            "seconds": self.seconds | {"total": sum(self.seconds.values())},
            "sample": {name: values[name] for name in SAMPLE},
            "repairs": [asdict(repair) for repair in self.repairs],
            "versions": versions(),
        }

    def __str__(self) -> str:
        from shearling.report.facts import facts_of
        from shearling.report.text import words

        return words(facts_of(self.to_json()))

    def __repr__(self) -> str:
        from shearling.report.text import brief

        return brief(self.to_json())

    def _repr_html_(self) -> str:
        """The top of the report page, for notebooks."""
        from shearling.report.facts import facts_of
        from shearling.report.page import top

        return top(facts_of(self.to_json()))
