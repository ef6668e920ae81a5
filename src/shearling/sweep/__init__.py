"""The curve of a model: methods x budgets x seeds, one measurement a method and seed, each pruned model scored.

grid.py    what to try, and trying it
store.py   the folder a sweep writes, point by point, so that an interrupted one goes on
job.py     from a model directory to results.json, curve.svg and report.html
"""

from shearling.sweep.grid import Grid, Outcome, grid_of, outcomes
from shearling.sweep.job import describe_planned, describe_sweep, planned, sweep_source

__all__ = [
    "Grid",
    "Outcome",
    "describe_planned",
    "describe_sweep",
    "grid_of",
    "outcomes",
    "planned",
    "sweep_source",
]
