"""`shearling evaluate`."""

from __future__ import annotations

from typing import Annotated

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling evaluate my-model-50 --data dev.jsonl",
    "shearling evaluate my-model-50 --data dev.jsonl --record",
    "shearling evaluate my-encoder --data queries --task retrieval --metric r@1",
)


@o.reads
def evaluate(
    model: o.Model,
    reading: o.DataOptions,
    batch_size: o.BatchSize = None,
    dtype: o.Dtype = None,
    compiled: Annotated[bool, o.advanced("--compile", help="Run the model through torch.compile.")] = False,
    record: Annotated[
        bool, o.output("--record", help="Also add the score to the checkpoint's record and model card.")
    ] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Score MODEL, dense or pruned, on labelled data."""
    from shearling.cli.console import emit, print_facts
    from shearling.report.facts import facts_of_score
    from shearling.workflows.evaluate import STAGES, evaluate_source, record_evaluation
    from shearling.workflows.progress import watching

    source = reading.source(model, batch_size=batch_size, dtype=dtype)
    with watching(not quiet, STAGES) as watcher:
        score = record_evaluation if record else evaluate_source
        result = score(source, limit=reading.limit, compiled=compiled, watcher=watcher)
    if as_json:
        emit(result.to_json())
    else:
        print_facts(facts_of_score(result.to_json(), model), quiet=quiet)
