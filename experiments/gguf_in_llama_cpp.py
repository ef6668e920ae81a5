"""A pruned language model in llama.cpp: the same text as PyTorch, the same perplexity, and how much faster than dense.

    python experiments/gguf_in_llama_cpp.py --dense SmolLM2-135M-Instruct.Q4_1.gguf --pruned small --text test.txt

Both models are exported in each precision. Greedy tokens and perplexity are compared with PyTorch in float32 on texts
that the sample does not hold; dense and pruned files generate in turns. Needs `shearling[gguf]` and llama-cpp-cffi.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.data import read_rows
from shearling.exporters import gguf
from shearling.exporters.formats import Job
from shearling.exporters.gguf_run import LlamaCpp, has_llama_cpp, runtime

PROMPTS, PROMPT, NEW = 20, 24, 32
WINDOWS, WINDOW = 12, 256
ROUNDS = 5


def texts(path: Path, tokenizer: Any) -> list[list[int]]:
    """The file as windows of tokens."""
    lines = read_rows(path).column("text")
    ids = tokenizer("\n".join(map(str, lines))[:400_000])["input_ids"]
    return [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)]


@torch.inference_mode()
def greedy(model: Any, tokens: list[int]) -> list[int]:
    """PyTorch's most likely next tokens, with its cache."""
    found: list[int] = []
    step, cache = torch.tensor([tokens]), None
    while len(found) < NEW:
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(int(out.logits[0, -1].argmax()))
        step = torch.tensor([[found[-1]]])
    return found


def perplexity(logits: list[Any], windows: list[list[int]]) -> float:
    losses = []
    for found, window in zip(logits, windows, strict=True):
        scores = torch.as_tensor(np.asarray(found)[:-1]).double().log_softmax(-1)
        losses.append(-scores.gather(1, torch.tensor(window[1:])[:, None]).mean().item())
    return math.exp(statistics.fmean(losses))


def compare(model: Any, engine: LlamaCpp, windows: list[list[int]], tokenizer: Any) -> dict[str, Any]:
    """One file against its model."""
    with torch.inference_mode():
        ours = [model(input_ids=torch.tensor([w])).logits[0].numpy() for w in windows[:WINDOWS]]
    theirs = [engine.logits(w) for w in windows[:WINDOWS]]
    prompts = [w[:PROMPT] for w in windows[WINDOWS : WINDOWS + PROMPTS]]
    pairs = [(greedy(model, p), engine.greedy(p, NEW)) for p in prompts]
    same = [float((a.argmax(-1) == b.argmax(-1)).mean()) for a, b in zip(ours, theirs, strict=True)]
    words = [tokenizer.decode(w) for w in windows[:WINDOWS]]
    return {
        "greedy_equal": sum(a == b for a, b in pairs),
        "greedy_prompts": len(pairs),
        "greedy_tokens_equal": statistics.fmean(_shared(a, b) for a, b in pairs),
        "next_token_equal": statistics.fmean(same),
        "perplexity_pytorch": perplexity(ours, windows[:WINDOWS]),
        "perplexity_llama_cpp": perplexity(theirs, windows[:WINDOWS]),
        "texts_cut_alike": sum(engine.tokenize(t) == tokenizer(t)["input_ids"] for t in words) / len(words),
    }


def _shared(a: list[int], b: list[int]) -> float:
    """The share of tokens before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) / len(a)


def speed(engines: dict[str, LlamaCpp], prompt: list[int]) -> dict[str, float]:
    """Tokens a second while generating, in turns; the median of the rounds."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(ROUNDS + 1):
        for name, engine in engines.items():
            engine.greedy(prompt, 1)
            began = time.perf_counter()
            engine.greedy(prompt[:1], NEW)
            if round_:
                found[name].append(NEW / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--pruned", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--precisions", default=",".join(gguf.FILE_TYPES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gguf_in_llama_cpp.json")
    options = parser.parse_args()
    if not has_llama_cpp():
        sys.exit("llama.cpp is not here: pip install llama-cpp-cffi")
    tokenizer = load_tokenizer(options.dense)
    windows = texts(options.text, tokenizer)
    models = {n: load_model(getattr(options, n), device="cpu", dtype="float32") for n in ("dense", "pruned")}
    rows = []
    for precision in options.precisions.split(","):
        with tempfile.TemporaryDirectory() as folder:
            engines, sizes = {}, {}
            for name, model in models.items():
                path = Path(folder) / f"{name}.gguf"
                gguf.write(Job(model, {}, ["logits"], path, precision, tokenizer=tokenizer, source=options.dense))
                engines[name], sizes[name] = LlamaCpp(path), path.stat().st_size
            rates = speed(engines, windows[0][:PROMPT])
            for name, model in models.items():
                rows.append({"model": name, "precision": precision, "bytes": sizes[name],
                             "faster": rates[name] / rates["dense"],
                             **compare(model, engines[name], windows, tokenizer)})  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    options.out.write_text(json.dumps({"runtime": runtime(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
