"""Compare two models on the same data: agreement, score and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.costs import parameters, weight_bytes, whole_macs
from shearling.engine.agreement import best_ends
from shearling.engine.head import head_of
from shearling.engine.hooks import device_of, frozen
from shearling.errors import DataError
from shearling.evaluation import metrics
from shearling.evaluation.exam import Exam, output_reader, predict
from shearling.evaluation.flipped import Flipped, flipped
from shearling.evaluation.scores import OutputReader, Predictions, Writer, score
from shearling.latency.timing import Times, device_name, in_turns
from shearling.sample.batch import IGNORED, LABELS
from shearling.sample.read import sample_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.data import Batches
    from shearling.engine.progress import Watcher


@dataclass(frozen=True)
class Compared:
    """One of the two models: its score (None without labels), and its costs.

    batch  shape of the batch it was timed on
    """

    model: str
    value: float | None
    em: float | None
    bytes: int
    params: int
    macs: int
    milliseconds: float
    spread: float
    batch: tuple[int, ...]


@dataclass(frozen=True)
class OutputAgreement:
    """Agreement of the outputs in percent: equal predictions, Spearman of numbers, or cosine of embeddings."""

    measure: str
    value: float
    count: int


@dataclass(frozen=True)
class Comparison:
    """The result; `agreement` is None if the models do not share a tokenizer or differ in their outputs.

    batch    shape of the first model's timed batch
    flipped  examples with different predictions; None for outputs that are not discrete
    """

    task: str
    metric: str
    examples: int
    agreement: OutputAgreement | None
    batch: tuple[int, ...]
    device: str
    sides: tuple[Compared, Compared]
    flipped: Flipped | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields of `shearling compare --json`."""
        fields = asdict(self)
        return fields | {"batch": list(self.batch), "models": list(fields.pop("sides"))}

    def __str__(self) -> str:
        from shearling.report.facts import facts_of_comparison
        from shearling.report.text import words

        return words(facts_of_comparison(self.to_json()))

    def _repr_html_(self) -> str:
        """The top of the report page, for notebooks."""
        from shearling.report.facts import facts_of_comparison
        from shearling.report.page import top

        return top(facts_of_comparison(self.to_json()))


@dataclass(frozen=True)
class Side:
    """One of two models to compare.

    name    its name in the report
    exam    the rows as this model reads them
    folder  its directory; None for a model in memory
    """

    name: str
    model: PreTrainedModel
    exam: Exam
    folder: str | None = None


def compare(sides: Sequence[Side], watcher: Watcher = lambda stage, done, total: None) -> Comparison:
    """Run both models on their rows. Only scores need labels."""
    models, exam = [side.model for side in sides], sides[0].exam
    taken = [_Taken.of(side, f"model {number}", watcher) for number, side in enumerate(sides, start=1)]
    # Outputs are comparable only for the same examples in the same order, with the same vocabulary.
    words: list[Any] = [getattr(side.exam.encoder.tokenizer, "get_vocab", dict)() for side in sides]
    alike = words[0] == words[1] and np.array_equal(taken[0].batches.order, taken[1].batches.order)
    agreed = agreement_of(taken[0].notes, taken[1].notes) if alike else None
    changed = flipped(exam, taken[0].predictions, taken[1].predictions) if agreed else None
    # The middle batch: batches are sorted by length.
    middle = [one.batches[len(one.batches) // 2] for one in taken]
    batches = [{name: tensor for name, tensor in batch.items() if name not in LABELS} for batch in middle]
    watcher("time", 0, 1)
    times = _times(models, batches)
    watcher("time", 1, 1)
    samples = [sample_of(one.batches) for one in taken]
    macs = [whole_macs(model, s.some(1), s.mean_lengths) for model, s in zip(models, samples, strict=True)]
    found = [
        Compared(side.name, one.value, one.em, disk_bytes(side.folder, side.model), parameters(side.model),
                 count, 1e3 * time.median, 1e3 * time.spread, tuple(next(iter(batch.values())).shape))
        for side, one, time, batch, count in zip(sides, taken, times, batches, macs, strict=True)
    ]  # fmt: skip
    return Comparison(
        exam.task.name, taken[0].metric, taken[0].examples, agreed, found[0].batch, device_name(device_of(models[0])),
        (found[0], found[1]), changed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Taken:
    """A model's results: the score if there are labels, its choices batch by batch, and the batches."""

    value: float | None
    em: float | None
    metric: str
    examples: int
    notes: list[Tensor]
    batches: Batches
    predictions: Predictions | None

    @classmethod
    def of(cls, side: Side, stage: str, watcher: Watcher) -> _Taken:
        exam, model = side.exam, side.model
        notes: list[Tensor] = []
        seen: list[Batches] = []
        whole = output_reader(model)

        def run(batches: Batches, read: OutputReader | Writer | None) -> Tensor:
            how: dict[str, Any] = {"device": device_of(model), "progress": partial(watcher, stage)}
            if isinstance(read, Writer):
                return predict(model, batches, read=read, **how)

            def both(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
                notes.append(choices(outputs, batch, whole).float().cpu())
                return (read or whole)(outputs, batch)

            seen.append(batches)
            return predict(model, batches, read=both, **how)

        try:
            result = score(exam, run)
        except DataError:
            if notes:
                raise  # the labels were read; something else is wrong
            run(replace(exam, encoder=replace(exam.encoder, labels="ignore")).batches(), None)
            said = _classes(exam, notes, seen[0])
            return cls(None, None, exam.task.metric, len(exam.rows), notes, seen[0], said)
        return cls(
            result.value, result.em, result.metric, result.examples, notes, seen[0], result.predictions
        )  # fmt: skip


def _classes(exam: Exam, notes: Sequence[Tensor], batches: Batches) -> Predictions | None:
    """A classifier's predictions for rows without labels, in the order of the rows."""
    if exam.task.kind != "classification":
        return None
    names, made = exam.encoder.config.id2label, [""] * len(batches.order)
    for number, choice in zip(batches.order, torch.cat(list(notes)), strict=True):
        made[number] = str(names[int(choice)])
    return Predictions(made)


def choices(outputs: Any, batch: dict[str, Tensor], read: OutputReader) -> Tensor:
    """The model's predictions, one row per decision: [n, 1] classes or numbers, [n, 2] spans, [n, D] embeddings.

    read  computes embeddings from the outputs of a model without a head
    """
    real = batch.get("attention_mask")
    head = head_of(outputs)
    if head == "span":
        return best_ends(outputs, real)
    if head == "embedding":
        return read(outputs, batch)
    logits: Tensor = outputs["logits"]
    if head == "tokens":
        counted = batch["labels"] != IGNORED if "labels" in batch else real
        best = logits.argmax(-1)
        if counted is not None and counted.shape == best.shape:  # a mask over samples of sound is not one over frames
            best = best[counted.bool()]
        return best.reshape(-1, 1)
    return torch.as_tensor(logits if head == "number" else logits.argmax(-1, keepdim=True))


def agreement_of(first: Sequence[Tensor], second: Sequence[Tensor]) -> OutputAgreement | None:
    """Agreement of two lists of choices; None if their shapes differ."""
    a, b = torch.cat(list(first)), torch.cat(list(second))
    if a.shape != b.shape:
        return None
    whole = bool((a == a.round()).all() and (b == b.round()).all())
    if a.shape[-1] > 2:
        return OutputAgreement("cosine", 100 * float(F.cosine_similarity(a, b).mean()), len(a))
    if whole:
        return OutputAgreement("equal", 100 * float((a == b).all(-1).float().mean()), len(a))
    return OutputAgreement("spearman", 100 * float(metrics.spearman(a[:, 0].numpy(), b[:, 0].numpy())), len(a))


def disk_bytes(directory: str | None, model: PreTrainedModel) -> int:
    """Bytes of the weight files in a directory, or of the parameters of a model from the Hub or in memory."""
    folder = None if directory is None else Path(directory)
    if folder is not None and folder.is_dir():
        files = [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)]
        if files:
            return sum(path.stat().st_size for path in files)
    return weight_bytes(model)


def _times(models: Sequence[PreTrainedModel], batches: Sequence[dict[str, Tensor]]) -> list[Times]:
    """Time each model on its own batch, since vocabularies may differ."""
    runs = [
        partial(model, **{name: tensor.to(device_of(model)) for name, tensor in batch.items()})
        for model, batch in zip(models, batches, strict=True)
    ]
    with frozen(models[0]), frozen(models[1]), torch.no_grad():
        return in_turns(runs, device_of(models[0]))
