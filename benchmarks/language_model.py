"""What a language model of 0.5 billion parameters takes on a CPU: minutes, memory, and whether the estimate held.

    python benchmarks/language_model.py           # Qwen2.5-0.5B's shapes, random weights, 32 x 512 tokens, 80% of FLOPs
    python benchmarks/language_model.py --tiny    # the same script on a model of no size

The run is a process of its own that loads a directory, prunes and saves. Exits with 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, high_water, keep_json

MINUTES, GIGABYTES = 15.0, 6.0  # promised on two idle cores
HELD = 1.5  # an estimate is right within this factor
FLOPS = 0.8
SHAPES = {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 512,
}  # fmt: skip


def write_model(folder: Path, shapes: dict[str, Any]) -> None:
    """A model of random weights; no stage's work depends on their values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**shapes)).save_pretrained(folder)


def prune(folder: Path, texts: int, tokens: int) -> dict[str, Any]:
    """What a user runs, with its own clock and high-water mark."""
    began = time.perf_counter()
    import shearling

    known = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = torch.randint(known, (texts, tokens), generator=torch.Generator().manual_seed(0))
    pruned = shearling.prune(str(folder), [{"input_ids": some} for some in ids.split(8)], flops=FLOPS)
    pruned.save(folder / "pruned")
    return {
        "minutes": (time.perf_counter() - began) / 60,
        "gigabytes": high_water() / 1e9,
        "estimate": pruned.report.estimate,
        "seconds": pruned.report.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(prune(options.one, options.texts, options.tokens)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), TINY if options.tiny else SHAPES)
        command = [sys.executable, __file__, *sys.argv[1:], "--one", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    told = found["estimate"]
    print(f"{found['minutes']:.1f} minutes (promised: {MINUTES:g}), estimate {told['seconds'] / 60:.1f}")
    print(f"{found['gigabytes']:.2f} GB at most (promised: {GIGABYTES:g}), estimate {told['memory'] / 1e9:.2f}")
    settings = {"texts": options.texts, "tokens": options.tokens, "flops": FLOPS, "tiny": options.tiny}
    keep_json({"settings": settings, "machine": describe_machine(torch.device("cpu")), **found}, options.out)
    late = not options.tiny and not 1 / HELD < 60 * found["minutes"] / told["seconds"] < HELD
    if found["minutes"] > MINUTES or found["gigabytes"] > GIGABYTES or late:
        sys.exit("a promise is broken")


if __name__ == "__main__":
    main()
