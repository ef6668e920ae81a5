"""Two models on the same data, side by side: agreement, score and cost."""

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

from shearling.checkpoint.pretrained import load_model
from shearling.costs import parameters, whole_macs
from shearling.data import load_rows
from shearling.data.images import ImageOptions, reader_of
from shearling.engine.hooks import device_of, frozen
from shearling.errors import DataError, InputError
from shearling.evaluation import metrics
from shearling.evaluation.exam import Exam, make_exam, output_reader, predict
from shearling.evaluation.scores import OutputReader, Writer, score
from shearling.latency.timing import Times, device_name, in_turns
from shearling.sample.batch import IGNORED, LABELS
from shearling.sample.read import sample_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.data import Batches
    from shearling.engine.progress import Watcher


@dataclass(frozen=True)
class Compared:
    """One of the two: its score (None where the data has no labels), and its costs.

    batch  the shape of what it was timed on: a typical batch as this model reads the data
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
class Agreement:
    """How alike the outputs are, in points: equal predictions, Spearman of numbers, or cosine of embeddings."""

    measure: str
    value: float
    count: int


@dataclass(frozen=True)
class Comparison:
    """The whole of it; `agreement` is None where the two do not read the same tokens or differ in their outputs.

    batch  the first model's, examples before all else
    """

    task: str
    metric: str
    examples: int
    agreement: Agreement | None
    batch: tuple[int, ...]
    device: str
    sides: tuple[Compared, Compared]

    def to_json(self) -> dict[str, Any]:
        """The fields of `shearling compare --json`."""
        fields = asdict(self)
        return fields | {"batch": list(self.batch), "models": list(fields.pop("sides"))}


def compare(
    first: str,
    second: str,
    data: str | None,
    *,
    task: str | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    device: str = "auto",
    rounds: int = 15,
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
    metric: str | None = None,
    index: str | None = None,
    pooling: str | None = None,
    prefix: str | None = None,
    images: ImageOptions | None = None,
) -> Comparison:
    """Run both models on the data. Scores need labels; agreement, sizes and times do not.

    metric   one of the task's others, such as r@1
    index    of a search: `dense` has the first model embed the passages for both
    pooling  of embedding models, where their files do not say it
    prefix   of an encoder-decoder's sources; by default that of its configuration
    images   size, mean and deviation of images, where no processor lies beside the models
    """
    from shearling.data import find_task, infer_task

    names = (first, second)
    if index not in (None, "dense"):
        raise InputError(f"--index {index} is not known here; `dense` has {first} embed the passages for both")
    models = [load_model(n, device=device, trust_remote_code=trust_remote_code, pooling=pooling) for n in names]
    readers = [
        reader_of(name, model, images, trust_remote_code=trust_remote_code)
        for name, model in zip(names, models, strict=True)
    ]
    chosen = find_task(task) if task else infer_task(models[0])
    rows = load_rows(data, chosen, split="dev")
    exams = [
        make_exam(
            model, reader, rows, chosen, batch_size=batch_size, max_length=max_length, text_columns=text_columns,
            label_column=label_column, limit=limit, metric=metric, index=models[0] if index else None, prefix=prefix,
            teacher=models[0],
        )
        for model, reader in zip(models, readers, strict=True)
    ]  # fmt: skip
    taken = [
        _Taken.of(exam, model, f"model {number}", watcher)
        for number, (exam, model) in enumerate(zip(exams, models, strict=True), start=1)
    ]
    agreed = agreement(taken[0].notes, taken[1].notes) if _read_alike(readers, taken) else None
    batches = [_typical(one.batches) for one in taken]
    times = _times(models, batches, rounds)
    sides = [
        Compared(name, one.value, one.em, disk_bytes(name, model), parameters(model), _macs(model, one.batches),
                 1e3 * time.median, 1e3 * time.spread, tuple(next(iter(batch.values())).shape))
        for name, model, one, time, batch in zip(names, models, taken, times, batches, strict=True)
    ]  # fmt: skip
    return Comparison(
        chosen.name, taken[0].metric, taken[0].examples, agreed, sides[0].batch, device_name(device_of(models[0])),
        (sides[0], sides[1]),
    )  # fmt: skip


@dataclass(frozen=True)
class _Taken:
    """An exam taken: the score if there were labels, what the model said batch by batch, and the batches."""

    value: float | None
    em: float | None
    metric: str
    examples: int
    notes: list[Tensor]
    batches: Batches

    @classmethod
    def of(cls, exam: Exam, model: PreTrainedModel, stage: str, watcher: Watcher | None) -> _Taken:
        notes: list[Tensor] = []
        seen: list[Batches] = []
        whole = output_reader(model)

        def run(batches: Batches, read: OutputReader | Writer | None) -> Tensor:
            progress = None if watcher is None else lambda done, total: watcher(stage, done, total)
            if isinstance(read, Writer):
                return predict(model, batches, read=read, device=device_of(model), progress=progress)

            def both(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
                notes.append(choices(outputs, batch, whole).float().cpu())
                return (read or whole)(outputs, batch)

            seen.append(batches)
            return predict(model, batches, read=both, device=device_of(model), progress=progress)

        try:
            result = score(exam, run)
        except DataError:
            if notes:
                raise  # the labels were read; something else is wrong
            run(replace(exam, encoder=replace(exam.encoder, labels="ignore")).batches(), None)
            return cls(None, None, exam.task.metric, len(exam.rows), notes, seen[0])
        return cls(result.value, result.em, result.metric, result.examples, notes, seen[0])


def _read_alike(readers: Sequence[Any], taken: Sequence[_Taken]) -> bool:
    """Whether both were given the same examples in the same order, in the same words where there are words."""
    words: list[Any] = [getattr(reader, "get_vocab", dict)() for reader in readers]
    return bool(words[0] == words[1] and np.array_equal(taken[0].batches.order, taken[1].batches.order))


def choices(outputs: Any, batch: dict[str, Tensor], read: OutputReader) -> Tensor:
    """What the model says, one row per decision: [n, 1] classes or numbers, [n, 2] spans, [n, D] embeddings.

    read  gives the embeddings of a model without a head
    """
    real = batch.get("attention_mask")
    if "start_logits" in outputs:
        ends = torch.stack([outputs["start_logits"], outputs["end_logits"]], dim=1).float()  # [B, 2, S]
        if real is not None:
            ends = ends.masked_fill(real[:, None] == 0, -torch.inf)
        return ends.argmax(-1)
    if "logits" not in outputs:
        return read(outputs, batch)
    logits: Tensor = outputs["logits"]
    if logits.dim() == 3:
        counted = batch["labels"] != IGNORED if "labels" in batch else real
        best = logits.argmax(-1)
        return (best if counted is None else best[counted.bool()]).reshape(-1, 1)
    return torch.as_tensor(logits if logits.shape[-1] == 1 else logits.argmax(-1, keepdim=True))


def agreement(first: Sequence[Tensor], second: Sequence[Tensor]) -> Agreement | None:
    """How alike two lists of choices are; None where they are not of one kind."""
    a, b = torch.cat(list(first)), torch.cat(list(second))
    if a.shape != b.shape:
        return None
    whole = bool((a == a.round()).all() and (b == b.round()).all())
    if a.shape[-1] > 2:
        return Agreement("cosine", 100 * float(F.cosine_similarity(a, b).mean()), len(a))
    if whole:
        return Agreement("equal", 100 * float((a == b).all(-1).float().mean()), len(a))
    return Agreement("spearman", 100 * float(metrics.spearman(a[:, 0].numpy(), b[:, 0].numpy())), len(a))


def disk_bytes(name: str, model: PreTrainedModel) -> int:
    """The weight files of a directory; for a model from the Hub, the bytes of its parameters."""
    folder = Path(name)
    files = [p for pattern in ("*.safetensors", "*.bin") for p in folder.glob(pattern)] if folder.is_dir() else []
    if files:
        return sum(path.stat().st_size for path in files)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _typical(batches: Batches) -> dict[str, Tensor]:
    """The middle batch without its labels: they are sorted by length."""
    return {name: tensor for name, tensor in batches[len(batches) // 2].items() if name not in LABELS}


def _macs(model: PreTrainedModel, batches: Batches) -> int:
    """Of one example; images and sound have no tokens to count, and are taken as they are."""
    sample = sample_of(batches)
    return whole_macs(model, sample.some(1), sample.mean_lengths)


def _times(models: Sequence[PreTrainedModel], batches: Sequence[dict[str, Tensor]], rounds: int) -> list[Times]:
    """Each model on its own batch: the other's tokens may not be in its vocabulary."""
    place = device_of(models[0])
    runs = [
        partial(model, **{name: tensor.to(place) for name, tensor in batch.items()})
        for model, batch in zip(models, batches, strict=True)
    ]
    with frozen(models[0]), frozen(models[1]), torch.inference_mode():
        return in_turns(runs, place, rounds=rounds)
