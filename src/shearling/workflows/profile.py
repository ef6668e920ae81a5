"""The whole job of `shearling profile`: a model directory in, a table file out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shearling.checkpoint.pretrained import check_prunable, load_model
from shearling.engine.progress import Watcher, silent
from shearling.files import check_file
from shearling.latency.profile import BUDGET, profile
from shearling.latency.table import Table
from shearling.report.charts import check_picture, plot


@dataclass(frozen=True)
class Setting:
    """What the model will run on, and how."""

    batch_size: int = 32
    seq_len: int = 128
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None
    runtime: str = "eager"
    budget: float = BUDGET
    trust_remote_code: bool = False


def profile_source(
    model: str,
    setting: Setting,
    *,
    out: Path,
    picture: Path | None = None,
    force: bool = False,
    watcher: Watcher | None = None,
) -> Table:
    """Measure a model directory; writes the table, and a picture of it where one is asked for."""
    check_file(out, force=force)
    if picture is not None:
        check_file(picture, force=force)
        check_picture(picture)
    check_prunable(model, trust_remote_code=setting.trust_remote_code)
    loaded = load_model(model, device=setting.device, dtype=setting.dtype, trust_remote_code=setting.trust_remote_code)
    table = profile(
        loaded,
        batch_size=setting.batch_size,
        seq_len=setting.seq_len,
        threads=setting.threads,
        runtime=setting.runtime,
        budget=setting.budget,
        progress=silent if watcher is None else partial(watcher, "profile"),
    )
    table.save(out)
    if picture is not None:
        plot(table, picture)
    return table
