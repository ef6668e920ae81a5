"""A pruned language model in llama.cpp: the same text as PyTorch, the same perplexity, and how much faster than dense.

    python experiments/gguf_in_llama_cpp.py --dense FILE.gguf --pruned DIR --text test.txt --data valid.txt

Both models are exported in each precision, q4_0 also rounded by the inputs of each layer on `--data`. Greedy tokens
and perplexity are compared with PyTorch in float32 on texts that the sample does not hold; dense and pruned files read
a prompt and generate in turns, at each number of threads. Needs `shearling[gguf]` and llama-cpp-cffi.

llama-cpp-cffi is built with GCC 13. Where the system's libstdc++ is older, it lacks one function, and this stands in:

    echo '#include <exception>
    extern "C" void __cxa_call_terminate(void*) { std::terminate(); }' | g++ -shared -fPIC -x c++ - -o terminate.so
    LD_PRELOAD=$PWD/terminate.so python experiments/gguf_in_llama_cpp.py ...
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.data import read_rows
from shearling.exporters import gguf
from shearling.exporters.formats import Job
from shearling.exporters.gguf_run import LlamaCpp, has_llama_cpp, runtime

PROMPT, NEW = 24, 32  # tokens
WINDOW = 256
CALIBRATION = 32  # windows that q4_0 is rounded by
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


@dataclass(frozen=True)
class Answers:
    """What PyTorch gives: logits of every window, and the greedy text after every prompt."""

    logits: list[Any]
    greedy: list[list[int]]


@torch.inference_mode()
def answers(model: Any, windows: list[list[int]], prompts: list[list[int]]) -> Answers:
    logits = [model(input_ids=torch.tensor([w])).logits[0].numpy() for w in windows]
    return Answers(logits, [greedy(model, prompt) for prompt in prompts])


def compare(
    ours: Answers, engine: LlamaCpp, windows: list[list[int]], prompts: list[list[int]], tokenizer: Any
) -> dict[str, Any]:
    """One file against its model."""
    theirs = [engine.logits(w) for w in windows]
    pairs = [(a, engine.greedy(p, NEW)) for a, p in zip(ours.greedy, prompts, strict=True)]
    same = [float((a.argmax(-1) == b.argmax(-1)).mean()) for a, b in zip(ours.logits, theirs, strict=True)]
    words = [tokenizer.decode(w) for w in windows]
    return {
        "greedy_equal": sum(a == b for a, b in pairs),
        "greedy_prompts": len(pairs),
        "greedy_tokens_equal": statistics.fmean(_shared(a, b) for a, b in pairs),
        "next_token_equal": statistics.fmean(same),
        "perplexity_pytorch": perplexity(ours.logits, windows),
        "perplexity_llama_cpp": perplexity(theirs, windows),
        "texts_cut_alike": sum(engine.tokenize(t) == tokenizer(t)["input_ids"] for t in words) / len(words),
    }


def _shared(a: list[int], b: list[int]) -> float:
    """The share of tokens before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) / len(a)


def speed(files: dict[str, Path], threads: int, window: list[int]) -> dict[str, dict[str, float]]:
    """Tokens a second of a prompt and of generation, the files in turns; the median of the rounds."""
    torch.set_num_threads(threads)
    engines = {name: LlamaCpp(path) for name, path in files.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for round_ in range(ROUNDS + 1):
        for name, engine in engines.items():
            seconds = [_seconds(engine, window, 1), _seconds(engine, window[:1], NEW)]
            if round_:
                found[name].append((len(window) / seconds[0], NEW / seconds[1]))
    rates = {name: map(statistics.median, zip(*values, strict=True)) for name, values in found.items()}
    return {name: dict(zip(("prompt", "generation"), pair, strict=True)) for name, pair in rates.items()}


def _seconds(engine: LlamaCpp, tokens: list[int], count: int) -> float:
    began = time.perf_counter()
    engine.greedy(tokens, count)
    return time.perf_counter() - began


def write(model: Any, path: Path, variant: str, source: str, calibration: list[list[int]]) -> None:
    """A file; `q4_0+data` is rounded by the calibration windows, on a copy because that changes the weights."""
    precision, _, data = variant.partition("+")
    tokens = torch.tensor(calibration)
    batches = [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}] if data else []
    subject = copy.deepcopy(model) if data else model
    gguf.write(Job(subject, {}, ["logits"], path, precision, batches, tokenizer=load_tokenizer(source), source=source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--pruned", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="texts that q4_0+data is rounded by")
    parser.add_argument("--variants", default=",".join([*gguf.FILE_TYPES, "q4_0+data"]))
    parser.add_argument("--windows", type=int, default=12, help="of 256 tokens, for the perplexity")
    parser.add_argument("--prompts", type=int, default=20, help="that 32 tokens are generated after")
    parser.add_argument("--threads", default="1,2", help="comma-separated, for the speed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gguf_in_llama_cpp.json")
    options = parser.parse_args()
    if not has_llama_cpp():
        sys.exit("llama.cpp is not here: pip install llama-cpp-cffi")
    tokenizer = load_tokenizer(options.dense)
    held_out, calibration = (texts(path, tokenizer) for path in (options.text, options.data))
    windows = held_out[: options.windows]
    prompts = [w[:PROMPT] for w in held_out[options.windows : options.windows + options.prompts]]
    models = {n: load_model(getattr(options, n), device="cpu", dtype="float32") for n in ("dense", "pruned")}
    expected = {name: answers(model, windows, prompts) for name, model in models.items()}
    rows: list[dict[str, Any]] = []
    for variant in options.variants.split(","):
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder) / f"{name}.gguf" for name in models}
            for name, model in models.items():
                write(model, files[name], variant, options.dense, calibration[:CALIBRATION])
            rates = {int(count): speed(files, int(count), windows[0]) for count in options.threads.split(",")}
            for name, path in files.items():
                row = {"model": name, "variant": variant, "bytes": path.stat().st_size, "tokens_per_second": {}}
                for count, rate in rates.items():
                    times = {f"{kind}_faster": rate[name][kind] / rate["dense"][kind] for kind in rate[name]}
                    row["tokens_per_second"][count] = rate[name] | times
                rows.append(row | compare(expected[name], LlamaCpp(path), windows, prompts, tokenizer))
                print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps({"runtime": runtime(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
