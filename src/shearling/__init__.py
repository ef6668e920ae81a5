"""shearling prunes a fine-tuned Transformer in seconds, without retraining.

>>> import shearling
>>> pruned = shearling.prune("my-model", texts, flops=0.5)  # doctest: +SKIP
>>> pruned.save("my-model-50")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shearling._version import __version__
from shearling.checkpoint.register import register_when_needed
from shearling.errors import (
    CheckFailed,
    CheckpointError,
    ConstraintError,
    DataError,
    InputError,
    ModelError,
    OutputError,
    ShearlingError,
    TableError,
    UnsupportedArchitecture,
)

if TYPE_CHECKING:
    from shearling.checkpoint.load import load
    from shearling.integrations.trainer import PruneOnTrainEnd
    from shearling.latency.table import Table, load_table
    from shearling.methods import Paper, Surgeon
    from shearling.pipeline import Plan, Pruned
    from shearling.workflows.compare import compare
    from shearling.workflows.evaluate import evaluate
    from shearling.workflows.export import export
    from shearling.workflows.profile import profile
    from shearling.workflows.prune import load_plan, measure, prune
    from shearling.workflows.sweep import sweep

__all__ = [
    "CheckFailed",
    "CheckpointError",
    "ConstraintError",
    "DataError",
    "InputError",
    "ModelError",
    "OutputError",
    "Paper",
    "Plan",
    "PruneOnTrainEnd",
    "Pruned",
    "ShearlingError",
    "Surgeon",
    "Table",
    "TableError",
    "UnsupportedArchitecture",
    "__version__",
    "compare",
    "evaluate",
    "export",
    "load",
    "load_plan",
    "load_table",
    "measure",
    "profile",
    "prune",
    "sweep",
]

# Where every other public name lives; imported when first asked for, so that `import shearling` stays quick.
_HOMES = {
    "shearling.integrations.trainer": ("PruneOnTrainEnd",),
    "shearling.checkpoint.load": ("load",),
    "shearling.latency.table": ("Table", "load_table"),
    "shearling.methods": ("Paper", "Surgeon"),
    "shearling.pipeline": ("Plan", "Pruned"),
    "shearling.workflows.compare": ("compare",),
    "shearling.workflows.evaluate": ("evaluate",),
    "shearling.workflows.export": ("export",),
    "shearling.workflows.profile": ("profile",),
    "shearling.workflows.prune": ("load_plan", "measure", "prune"),
    "shearling.workflows.sweep": ("sweep",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shearling' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_needed()
