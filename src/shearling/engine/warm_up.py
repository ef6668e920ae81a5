"""Load CUDA libraries while the host reads the data: the first use of each takes up to 0.1 s."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch


def warm_up(device: torch.device) -> None:
    """Start loading in a background thread; does nothing on a CPU."""
    if device.type == "cuda":
        threading.Thread(target=_touch_libraries, args=(device,), daemon=True).start()


def _touch_libraries(device: torch.device) -> None:
    """One small problem for each library that the stages use."""
    with suppress(RuntimeError), torch.cuda.device(device), torch.no_grad():
        small = torch.eye(16, dtype=torch.float64, device=device)[None].repeat(2, 1, 1)
        factor, _ = torch.linalg.cholesky_ex(small)
        torch.cholesky_solve(small, factor)
        torch.cholesky_inverse(factor)
        torch.linalg.inv_ex(small)
        torch.baddbmm(small, small, small)
        half = small.bfloat16()
        half @ half
        small.float() @ small.float()
