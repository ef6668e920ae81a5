"""A Trainer callback that prunes at the end of training."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from shearling.engine.distributed import fail_together
from shearling.errors import DataError, InputError, ShearlingError
from shearling.files import check_writable
from shearling.models.structure import structure_of
from shearling.pipeline import measure
from shearling.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.pipeline import Pruned

logger = logging.getLogger("shearling")


class PruneOnTrainEnd(TrainerCallback):
    """Prune the trained model on its own training data and save it to `out`.

    >>> trainer.add_callback(shearling.PruneOnTrainEnd(flops=0.5, out="my-model-50"))  # doctest: +SKIP

    out, force  output directory, and whether it may be replaced
    options     as for `shearling.prune`: flops, params, latency, method, samples, seed, flops_length, ...

    An output that cannot be written or an unsupported architecture raises before the training. Later errors are logged
    and stored in `error`, so that the trained model is not lost. `pruned` is the result.
    """

    def __init__(self, *, out: str | os.PathLike[str], force: bool = False, **options: Any) -> None:
        goals = {one.name for one in fields(Target)}
        if "flops_length" in options:
            options["length"] = options.pop("flops_length")
        known = goals | inspect.signature(measure).parameters.keys() - {"model", "data", "notes", "target"}
        unknown = sorted(options.keys() - known)
        if unknown:
            names = ", ".join(sorted(known - {"length"} | {"flops_length"}))
            raise InputError(f"PruneOnTrainEnd has no option {', '.join(unknown)}; there are {names}.")
        self.out, self.force = Path(out), force
        self.target = Target(**{name: options.pop(name) for name in goals & options.keys()}).checked()
        self.options = options
        self.pruned: Pruned | None = None
        self.error: Exception | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_writable(self.out, force=self.force)
        structure_of(_merged(kwargs["model"], copied=False))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        try:
            with fail_together():
                data = _alike_everywhere(kwargs.get("train_dataloader"), args, self.options.get("seed", 0))
                model = _merged(kwargs["model"], copied=True)
                pruned = measure(model, data, **self.options, target=self.target).meet(self.target)
                pruned.save(self.out, source=kwargs.get("processing_class"), force=self.force)  # rank 0 writes
            self.pruned = pruned
            if state.is_world_process_zero:
                logger.warning("pruned model written to %s\n%s", self.out, pruned)
        except Exception as error:  # anything: the training must not be lost
            self.error = error
            kind = "" if isinstance(error, ShearlingError) else f"{type(error).__name__}: "
            logger.error("The model was trained, but not pruned: %s%s", kind, error, exc_info=bool(kind))


def _alike_everywhere(loader: Any, args: Any, seed: int) -> Any:
    """The training data in an order that depends only on the seed, the same on every rank."""
    if loader is None:
        raise DataError("The trainer has no training data to calibrate on.")
    dataset = loader.dataset
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return loader  # a stream
    return DataLoader(
        dataset,
        batch_size=args.per_device_train_batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        collate_fn=loader.collate_fn,
    )


def _merged(model: Any, *, copied: bool) -> PreTrainedModel:
    """The model, with trained adapters merged into a copy."""
    if not hasattr(model, "merge_and_unload"):
        return model
    return copy.deepcopy(model).merge_and_unload() if copied else model.get_base_model()
