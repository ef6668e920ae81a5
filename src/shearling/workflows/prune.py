"""`shearling.prune` and `shearling.measure`: models and data as people have them.

What is ready for the model goes straight to the pipeline; nothing that reads files or texts is imported for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shearling import pipeline
from shearling.engine.progress import Watcher
from shearling.methods import Method, method_of
from shearling.methods.ranges import Samples, Shape
from shearling.pipeline import Plan, Pruned
from shearling.target import TableLike, Target
from shearling.workflows.given import Data, is_transformer, model_in, needs_reading, renamed
from shearling.workflows.progress import READING, ProgressLike, stages_of, watching


def prune(
    model: Any,
    data: Data | None = None,
    *,
    tokenizer: Any = None,
    flops: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    table: TableLike = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    correct: bool = True,
    max_drop: float | None = None,
    by: str = "flops",
    eval: Data | None = None,  # noqa: A002 - the option's name
    limit: int | None = None,
    timing: bool = True,
    method: str | Method = "surgeon",
    multiple_of: int | None = None,
    shape: Shape = "uneven",
    samples: Samples = "auto",
    seed: int = 0,
    task: str | None = None,
    metric: str | None = None,
    index: str | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    max_length: int | None = None,
    flops_length: float | None = None,
    pooling: str | None = None,
    prefix: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: ProgressLike = True,
    watcher: Watcher | None = None,
    length: float | None = None,
) -> Pruned:
    """Prune once, without retraining. The model is left untouched; the result holds a smaller copy.

    >>> pruned = shearling.prune("my-model", ["a text", "another"], flops=0.5)  # doctest: +SKIP
    >>> pruned.save("my-model-50")  # doctest: +SKIP

    model       a transformers model, a directory or Hub id, a SentenceTransformer or CrossEncoder, or what this gave
    data        a list of texts or of pairs, a file name, a raw or tokenised `datasets.Dataset`, a DataLoader, batches
    tokenizer   for texts; by default the one that lies beside the model

    flops, params, latency  the constraint: keep at most this share of the layers' FLOPs, of their parameters, of the
                model's time; several hold together
    table       a latency table that `shearling.profile` made; without one, the model is profiled first
    batch_size, seq_len  what the latency is of, and what both models are timed at (one example of the sample's mean
                length by default)
    correct     where the model turns out slower than the table says, correct the table and choose again
    max_drop    instead of a constraint: the smallest model that loses at most so many points on `eval`
    by          with max_drop: flops, params or latency
    eval        labelled rows (a file name, a data set, a list of dicts): dense and pruned are scored on them
    limit       score on the first `limit` rows only
    timing      with `eval`: time both models too

    method      "surgeon", "paper", or a configured one such as `shearling.Surgeon(refit=False)`
    multiple_of round filter counts; by default to what the method asks for (surgeon: 8 in wide FFNs)
    shape       "uneven" (every layer its own sizes), or "stock": one width, one number of heads where the configuration
                can tell it, maybe fewer layers; an ordinary checkpoint that any engine of the family loads
    samples     how many examples to draw from the data, by the seed; "auto" takes up to 2,048
    seed        draws the sample, and labels from the model

    task        sst2, mnli, squad, ... or classification, sts, retrieval, ...; by default what the head is for
    metric      one of the task's others, such as r@1
    index       retrieval: who embeds the passages; `dense` is the original, else each model embeds its own
    text_columns, label_column  where texts and labels are in files and raw data sets, if the task does not tell
    max_length  cut texts to this many tokens
    flops_length  count FLOPs at this many tokens an example; by default the sample's mean
    pooling     of an embedding model whose files do not say it: mean, cls, last, max, weighted_mean
    prefix      of an encoder-decoder's sources, such as "summarize: "; by default that of its configuration
    device, dtype  for a model that is loaded by name: auto, cpu, cuda; float32, bfloat16, float16
    trust_remote_code  run code that the model brings along
    progress    True, False, or a function called with (stage, done, total)
    watcher, length  the old names of `progress` and `flops_length`
    """
    length = renamed("length", "flops_length", length, flops_length)
    progress = renamed("watcher", "progress", watcher, progress)
    model, chosen = model_in(model), method_of(method)
    expected = stages_of(chosen, scored=eval is not None, drop=max_drop is not None)
    target = Target(flops, params, multiple_of, latency, table, correct, batch_size, seq_len, shape)
    with watching(progress, expected) as watch:
        if _ready(model, data) and eval is None and max_drop is None:
            target = target.checked()
            plan = pipeline.measure(
                model, data, method=chosen, samples=samples, seed=seed, length=length, watcher=watch, target=target
            )  # fmt: skip
            return plan.meet(target)
        from shearling.workflows.max_drop import drop_of
        from shearling.workflows.pruning import prune_source
        from shearling.workflows.source import Source

        source = Source(
            model, data, task, text_columns, label_column, max_length, None, samples, seed, device, dtype,
            trust_remote_code, length, metric, index, pooling, tokenizer, prefix,
        )  # fmt: skip
        return prune_source(
            source, target, chosen, evaluation=eval, limit=limit, drop=drop_of(max_drop, by), timing=timing,
            watcher=watch,
        )  # fmt: skip


def measure(
    model: Any,
    data: Data | None = None,
    *,
    tokenizer: Any = None,
    method: str | Method = "surgeon",
    samples: Samples = "auto",
    seed: int = 0,
    task: str | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    max_length: int | None = None,
    flops_length: float | None = None,
    pooling: str | None = None,
    prefix: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: ProgressLike = True,
    watcher: Watcher | None = None,
    length: float | None = None,
) -> Plan:
    """Look at the model once, over a sample of its data; the plan then prunes to any constraint.

    >>> plan = shearling.measure(model, texts)  # doctest: +SKIP
    >>> smaller = plan.prune(flops=0.5)  # doctest: +SKIP

    The parameters are those of `shearling.prune`.
    """
    length = renamed("length", "flops_length", length, flops_length)
    progress = renamed("watcher", "progress", watcher, progress)
    model, chosen = model_in(model), method_of(method)
    with watching(progress, READING | dict(chosen.stages)) as watch:
        if _ready(model, data):
            return pipeline.measure(
                model, data, method=chosen, samples=samples, seed=seed, length=length, watcher=watch
            )  # fmt: skip
        from shearling.integrations.sentence_transformers import sentence_plan
        from shearling.workflows.source import Source, open_source

        source = Source(
            model, data, task, text_columns, label_column, max_length, None, samples, seed, device, dtype,
            trust_remote_code, length, None, None, pooling, tokenizer, prefix,
        )  # fmt: skip
        loaded = open_source(source, methods=[chosen], scored=False, watcher=watch)
        plan = pipeline.measure(
            loaded.model, loaded.examples, **source.sampling, method=chosen, watcher=watch, notes=loaded.notes
        )
        return plan if loaded.sentence is None else sentence_plan(plan, loaded.sentence)


def _ready(model: Any, data: Any) -> bool:
    """Whether model and data are what the pipeline takes."""
    if isinstance(model, (str, os.PathLike)) or data is None or needs_reading(data):
        return False
    # Not a SentenceTransformer or CrossEncoder; whatever else it is, the pipeline says what it makes of it.
    return is_transformer(model) or (not hasattr(model, "encode") and not hasattr(model, "predict"))
