"""Saved plans: a method's evidence as safetensors, with a JSON header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shearling.engine.distributed import on_first
from shearling.errors import CheckpointError
from shearling.files import write_whole
from shearling.schema import PLAN


def write_plan(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a plan atomically."""
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    on_first(lambda: write_whole(path, save(contiguous, metadata={"shearling": json.dumps(header)})))
    return path


def read_plan(path: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the header and the tensors of a plan, or the header alone."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["shearling"])
            found = {name: file.get_tensor(name) for name in file.keys() if tensors}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a plan that can be used: {error}") from None
    return PLAN.check(header, path), found
