"""`shearling evaluate`."""

from __future__ import annotations

from typing import Annotated

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling evaluate my-model-50 --data dev.jsonl",
    "shearling evaluate my-model-50 --data dev.jsonl --record",
    "shearling evaluate my-encoder --data queries --task retrieval --metric r@1",
)


def evaluate(
    model: o.Model,
    data: o.Data = None,
    task: o.Task = None,
    metric: o.Metric = None,
    index: o.Index = None,
    pooling: o.Pooling = None,
    prefix: o.Prefix = None,
    image_size: o.ImageSize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    text_columns: o.TextColumns = None,
    label_column: o.LabelColumn = None,
    limit: o.Limit = None,
    max_length: o.MaxLength = None,
    batch_size: o.BatchSize = None,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    compiled: Annotated[bool, o.advanced("--compile", help="Run the model through torch.compile.")] = False,
    record: Annotated[
        bool, o.output("--record", help="Also write the score into the checkpoint's record and model card.")
    ] = False,
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Score MODEL, dense or pruned, on labelled data."""
    from shearling.cli.console import emit, print_facts
    from shearling.report.facts import facts_of_score
    from shearling.workflows.evaluate import STAGES, evaluate_source, record_evaluation
    from shearling.workflows.progress import watching
    from shearling.workflows.source import Source

    source = Source(
        model, data, task, o.columns(text_columns), label_column, max_length, batch_size, device=device, dtype=dtype,
        trust_remote_code=trust_remote_code, metric=metric, index=index, pooling=pooling, prefix=prefix,
        images=o.images(image_size, mean, std),
    )  # fmt: skip
    with watching(not quiet, STAGES) as watcher:
        score = record_evaluation if record else evaluate_source
        result = score(source, limit=limit, compiled=compiled, watcher=watcher)
    if as_json:
        emit(result.to_json())
    else:
        print_facts(facts_of_score(result.to_json(), model), quiet=quiet)
