"""Cost and time on BERT-base- and DistilBERT-shaped random models: 2,048 examples of GLUE's mean length.

Accuracy means nothing on random weights; seconds, budgets and the self-check do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from common import PAPER, SURGEON, Lab, Row, aligned, main

from shearling.checkpoint.pretrained import named_device
from shearling.pipeline import measure
from shearling.sample.read import sample_of
from shearling.sample.sample import Sample

FLOPS = 0.6
LENGTH = 53  # mean tokens of the GLUE tasks of the paper


def rows(lab: Lab) -> Iterator[Row]:
    sample = _sample(lab.samples, lab.batch_size)
    warm = sample.drawn(lab.batch_size, 0)  # for a first run that is not timed
    for shape in ("bert-base", "distilbert-base"):
        model = _model(shape).to(named_device(lab.device))
        for method in (SURGEON, PAPER):
            lab.check_time()
            measure(model, warm, method=method).prune(flops=FLOPS)
            report = measure(model, sample, method=method, samples=lab.samples).prune(flops=FLOPS).report
            yield {
                "shape": shape, "method": method.name, "asked": FLOPS, "flops": report.flops.to_json(),
                "params": report.params.to_json(), "seconds": report.seconds, "total": sum(report.seconds.values()),
                "examples": report.examples, "mean_length": report.mean_length,
            }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    lines = []
    for row in found:
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in row["seconds"].items())
        lines.append([row["shape"], row["method"], f"{row['flops']['ratio']:.2%}", f"{row['total']:.2f}", stages])
    print(aligned([["shape", "method", "FLOPs", "seconds", "stages"], *lines]))


def _model(shape: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if shape == "bert-base":
        return transformers.BertForSequenceClassification(transformers.BertConfig()).eval()
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig()).eval()


def _sample(examples: int, batch_size: int) -> Sample:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH // 3, 2 * LENGTH - LENGTH // 3 + 1, (examples,), generator=generator)
    lengths = lengths.sort(descending=True).values
    batches = []
    for part in lengths.split(batch_size):
        mask = (torch.arange(int(part.max())) < part[:, None]).long()  # [B, S]
        ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
        labels = torch.randint(0, 2, (len(part),), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return sample_of(batches)


if __name__ == "__main__":
    main(sys.modules[__name__])
