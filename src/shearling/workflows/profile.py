"""`shearling.profile`: measure the latency table of a model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.pretrained import check_prunable, load_model
from shearling.files import check_file
from shearling.latency.profile import BUDGET
from shearling.latency.profile import profile as profile_model
from shearling.latency.table import Table
from shearling.report.charts import check_picture, plot
from shearling.workflows.arguments import model_in, renamed
from shearling.workflows.progress import ProgressLike, step, watching

if TYPE_CHECKING:
    from torch import Tensor


STAGES = {"load": 5.0, "profile": 95.0}


def profile(
    model: Any,
    *,
    batch_size: int = 32,
    seq_len: int = 128,
    threads: int | None = None,
    runtime: str = "eager",
    seconds: float = BUDGET,
    inputs: dict[str, Tensor] | None = None,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: ProgressLike = True,
    budget: float | None = None,
) -> Table:
    """Time the model on this machine with varying numbers of units; the table is used for `latency=`.

    model       a transformers model or the result of `shearling.prune`, timed on its device and in its dtype; or a
                directory or Hub id
    batch_size, seq_len  input shape in deployment
    threads     CPU threads; default: torch's setting
    runtime     "eager", or "graphs": models are recorded as CUDA graphs and replayed
    seconds     approximate duration; with less time, fewer layers and rounds are timed
    inputs      your own inputs, for unusual models; their batch size and length are used
    device, dtype, trust_remote_code  for a model that is loaded by name
    progress    True, False, or a callback (stage, done, total)
    budget      old name of `seconds`
    """
    seconds = renamed("budget", "seconds", budget, seconds)
    with watching(progress, STAGES) as watcher:
        if isinstance(model, (str, os.PathLike)):
            check_prunable(str(model), trust_remote_code=trust_remote_code)
            with step(watcher, "load"):
                model = load_model(str(model), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        return profile_model(
            model_in(model),
            batch_size=batch_size,
            seq_len=seq_len,
            threads=threads,
            runtime=runtime,
            budget=seconds,
            inputs=inputs,
            progress=partial(watcher, "profile"),
        )


def profile_source(model: str, *, out: Path, picture: Path | None = None, force: bool = False, **options: Any) -> Table:
    """Profile a model with the options of `profile`, and write the table and optionally a chart of it."""
    check_file(out, force=force)
    if picture is not None:
        check_file(picture, force=force)
        check_picture(picture)
    table = profile(model, **options)
    table.save(out)
    if picture is not None:
        plot(table, picture)
    return table
