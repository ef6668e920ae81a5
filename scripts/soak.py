"""Prune tiny models again and again in one process: memory stays flat, no hook is left behind.

    python scripts/soak.py --rounds 300

Exits with 1 if tensors or hooks are left over, or the process grows by more than --megabytes after the first rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import shearling

WARM = 5  # rounds until caches are filled


def resident() -> float:
    """MiB that the process holds now (the most it ever held, where the system does not tell)."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def tensors() -> int:
    """Tensors alive."""
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def hooks(model: torch.nn.Module) -> int:
    """Hooks on a model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def rounds(count: int) -> Iterator[dict[str, Any]]:
    """Prune the same model by both methods and to many budgets; what is left over once warm, and at the end."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertForSequenceClassification(config).train()
    ids = torch.randint(0, 50, (16, 12))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(16) % 2}]
    for number in range(count):
        ratio = 0.3 + 0.1 * (number % 6)
        shearling.prune(model, batches, flops=ratio, method=("surgeon", "paper")[number % 2])
        if number in (WARM, count - 1):
            yield {"round": number, "megabytes": resident(), "tensors": tensors(), "hooks": hooks(model)}


def verdict(seen: list[dict[str, Any]], megabytes: float) -> str:
    """What is wrong, or nothing."""
    first, last = seen[0], seen[-1]
    if last["hooks"]:
        return f"{last['hooks']} hooks are left on the caller's model"
    if last["tensors"] > first["tensors"]:
        return f"{last['tensors'] - first['tensors']} tensors more than after round {WARM}"
    grown = last["megabytes"] - first["megabytes"]
    return f"the process grew by {grown:.1f} MiB" if grown > megabytes else ""


def main() -> None:
    """Run, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--megabytes", type=float, default=32.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seen = list(rounds(max(options.rounds, WARM + 2)))
    print(json.dumps({"first": seen[0], "last": seen[-1]}))
    if wrong := verdict(seen, options.megabytes):
        raise SystemExit(wrong)


if __name__ == "__main__":
    main()
