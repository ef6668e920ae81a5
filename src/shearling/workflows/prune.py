"""`shearling.prune`, `shearling.measure` and `shearling.load_plan`.

Model inputs go directly to the pipeline, without importing the modules that read files and texts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling import pipeline
from shearling.checkpoint.plan import read_plan
from shearling.engine.progress import Watcher
from shearling.methods import Method, method_of
from shearling.methods.ranges import Samples, Shape
from shearling.pipeline import Plan, Pruned
from shearling.target import BY, TableLike, Target
from shearling.workflows.arguments import Data, is_transformer, model_in, needs_reading, renamed
from shearling.workflows.progress import READING, ProgressLike, stages_of, watching

if TYPE_CHECKING:
    from shearling.workflows.source import Loaded, Source


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
    by: str = BY,
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
    """Prune a model without retraining. The model is not changed; the result has a smaller copy.

    >>> pruned = shearling.prune("my-model", ["a text", "another"], flops=0.5)  # doctest: +SKIP
    >>> pruned.save("my-model-50")  # doctest: +SKIP

    model       a transformers model, a directory or Hub id, a SentenceTransformer or CrossEncoder, or an earlier result
    data        a list of texts or of pairs, a file name, a raw or tokenised `datasets.Dataset`, a DataLoader, batches
    tokenizer   for texts; default: the model's own

    flops, params, latency  the constraint: maximum share of the layers' FLOPs, of their parameters, of the model's
                time; several must all hold
    table       a latency table from `shearling.profile`; without one, the model is profiled first
    batch_size, seq_len  input shape of the latency and of timing; default: batch 1, the sample's mean length
    correct     if the model is slower than the table predicts, correct the table and choose again
    max_drop    instead of a constraint: find the smallest model that loses at most this many points on `eval`
    by          with max_drop: flops, params or latency
    eval        labelled rows (a file name, a data set, a list of dicts) for scoring dense and pruned
    limit       score only the first `limit` rows
    timing      with `eval`: also time both models

    method      "surgeon", "paper", or a configured one such as `shearling.Surgeon(refit=False)`
    multiple_of step of filter counts; default: the method's (surgeon: 8 in wide FFNs)
    shape       "uneven" (layers differ in size), or "stock": one width, one number of heads where the configuration
                has a field for it, maybe fewer layers; an ordinary checkpoint that any engine of the family loads
    samples     number of examples to draw by the seed; "auto" takes up to 2,048
    seed        of the sample, and of labels sampled from the model

    task        sst2, mnli, squad, ... or classification, sts, retrieval, ...; default: by the model's head
    metric      another metric of the task, such as r@1
    index       retrieval: with `dense` the dense model embeds the passages; default: each model its own
    text_columns, label_column  names of the columns in files and raw data sets, if the task's defaults do not match
    max_length  truncate texts to this many tokens
    flops_length  tokens per example for counting FLOPs; default: the sample's mean
    pooling     of an embedding model whose files do not have it: mean, cls, last, max, weighted_mean
    prefix      of an encoder-decoder's sources, such as "summarize: "; default: that of its configuration
    device, dtype  for a model that is loaded by name: auto, cpu, cuda; float32, bfloat16, float16
    trust_remote_code  run custom code of the model
    progress    True, False, or a callback (stage, done, total)
    watcher, length  old names of `progress` and `flops_length`
    """
    length = renamed("length", "flops_length", length, flops_length)
    progress = renamed("watcher", "progress", watcher, progress)
    model, chosen = model_in(model), method_of(method)
    expected = stages_of(chosen, scored=eval is not None, drop=max_drop is not None)
    target = Target(flops, params, multiple_of, latency, table, correct, batch_size, seq_len, shape)
    judged = any(value is not None for value in (eval, max_drop, limit)) or by != BY  # if only some, that is an error
    with watching(progress, expected) as watch:
        if _ready(model, data, pooling) and not judged:
            target = target.checked()
            plan = pipeline.measure(
                model, data, method=chosen, samples=samples, seed=seed, length=length, watcher=watch, target=target
            )  # fmt: skip
            return plan.meet(target)
        from shearling.workflows.max_drop import drop_of
        from shearling.workflows.pruning import prune_source
        from shearling.workflows.source import Source

        source = Source(
            model, data, task, text_columns=text_columns, label_column=label_column, max_length=max_length,
            samples=samples, seed=seed, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
            length=length, metric=metric, index=index, pooling=pooling, tokenizer=tokenizer, prefix=prefix,
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
    """Measure a model once over a sample of its data; the plan then prunes to any constraint.

    >>> plan = shearling.measure(model, texts)  # doctest: +SKIP
    >>> smaller = plan.prune(flops=0.5)  # doctest: +SKIP

    The parameters are those of `shearling.prune`.
    """
    length = renamed("length", "flops_length", length, flops_length)
    progress = renamed("watcher", "progress", watcher, progress)
    model, chosen = model_in(model), method_of(method)
    with watching(progress, READING | dict(chosen.stages)) as watch:
        if _ready(model, data, pooling):
            plan = pipeline.measure(
                model, data, method=chosen, samples=samples, seed=seed, length=length, watcher=watch
            )  # fmt: skip
            return _shown(plan, progress)
        from shearling.workflows.source import Source

        plan = _plan_of(
            Source(
                model, data, task, text_columns=text_columns, label_column=label_column, max_length=max_length,
                samples=samples, seed=seed, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
                length=length, pooling=pooling, tokenizer=tokenizer, prefix=prefix,
            ),
            chosen,
            watch,
            lambda loaded: pipeline.measure(
                loaded.model, loaded.examples, method=chosen, samples=samples, seed=seed, length=length,
                watcher=watch, notes=loaded.notes,
            ),
        )  # fmt: skip
        return _shown(plan, progress)


def load_plan(
    path: str | os.PathLike[str],
    model: Any,
    data: Data,
    *,
    tokenizer: Any = None,
    samples: int | None = None,
    task: str | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    prefix: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: ProgressLike = True,
) -> Plan:
    """Load what `Plan.save` wrote, given its model and data again, which the refit needs.

    The other parameters are those of `shearling.prune`; the sample is drawn as it was.
    """
    model = model_in(model)
    if _ready(model, data, pooling):
        return _shown(pipeline.load_plan(path, model, data, samples=samples), progress)
    from shearling.workflows.source import Source

    header, _ = read_plan(Path(path), tensors=False)
    with watching(progress, READING) as watch:
        plan = _plan_of(
            Source(
                model, data, task, text_columns=text_columns, label_column=label_column, max_length=max_length,
                samples=header["examples"] if samples is None else samples, seed=header["seed"], device=device,
                dtype=dtype, trust_remote_code=trust_remote_code, pooling=pooling, tokenizer=tokenizer, prefix=prefix,
            ),
            pipeline.method_of_plan(path, header),
            watch,
            lambda loaded: pipeline.load_plan(path, loaded.model, loaded.examples, samples=samples),
        )  # fmt: skip
        return _shown(plan, progress)


def _shown(plan: Plan, progress: ProgressLike) -> Plan:
    """The plan, each of whose `prune` shows its own progress."""
    done = READING.keys() | plan.seconds.keys()
    stages = {name: takes for name, takes in stages_of(plan.method).items() if name not in done}
    return replace(plan, watcher=None, shown=partial(watching, progress, stages))


def _plan_of(source: Source, method: Method, watch: Watcher, make: Callable[[Loaded], Plan]) -> Plan:
    """Open a source and make the plan of what it holds."""
    from shearling.integrations.sentence_transformers import sentence_plan
    from shearling.workflows.source import open_source

    loaded = open_source(source, methods=[method], scored=False, watcher=watch)
    plan = make(loaded)
    return plan if loaded.sentence is None else sentence_plan(plan, loaded.sentence)


def _ready(model: Any, data: Any, pooling: str | None) -> bool:
    """Whether model and data can go directly to the pipeline."""
    if isinstance(model, (str, os.PathLike)) or data is None or needs_reading(data) or pooling is not None:
        return False
    # Not a SentenceTransformer or CrossEncoder; the pipeline rejects other types.
    return is_transformer(model) or (not hasattr(model, "encode") and not hasattr(model, "predict"))
