"""Score a model, dense or pruned, on a task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shearling.checkpoint.pretrained import named_device
from shearling.data.batches import Batches, Tensors
from shearling.data.encoder import Labels, make_encoder
from shearling.data.retrieval import first_queries
from shearling.data.rows import as_rows
from shearling.data.tasks import Task, check_head, task_of
from shearling.engine.decoder import write
from shearling.engine.distributed import on_first
from shearling.engine.head import ENDS, head_of
from shearling.engine.hooks import device_of, frozen, told_what_is_refused
from shearling.engine.progress import Progress, silent
from shearling.errors import DataError, InputError, ModelError
from shearling.evaluation.scores import Evaluation as Evaluation
from shearling.evaluation.scores import OutputReader, Predict, Questions, Writer, next_tokens, score
from shearling.models.pooling import pool, pooling_of
from shearling.sample.batch import LABELS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Whether the encoder reads labels; default: required.
_LABELS: dict[str, Labels] = {
    "question-answering": "ignore", "embedding": "ignore", "retrieval": "ignore", "knn": "ignore",
    "seq2seq": "optional",
}  # fmt: skip


class Exam(Questions):
    """Labelled rows to score several models of one family on; read and tokenised once."""

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the rows."""
        return self.rows.fingerprint()

    def take(
        self,
        model: PreTrainedModel,
        *,
        device: str | torch.device | None = None,
        compile: bool = False,  # noqa: A002
        progress: Progress = silent,
    ) -> Evaluation:
        """Score one model, on its device unless another is given. With several processes, only rank 0 runs it."""
        progress(0, 1)

        def run(batches: Batches, read: OutputReader | Writer | None) -> torch.Tensor:
            return predict(model, batches, read=read, device=device, compile=compile, progress=progress)

        def taken() -> Evaluation:
            began = time.perf_counter()
            return replace(score(self, run), seconds=time.perf_counter() - began, rows=self.fingerprint)

        return on_first(taken)


def make_exam(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Any,
    task: Task | str | None = None,
    *,
    batch_size: int = 64,
    max_length: int | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    metric: str | None = None,
    index: PreTrainedModel | None = None,
    prefix: str | None = None,
    teacher: PreTrainedModel | None = None,
) -> Exam:
    """Create an exam for `model` and models pruned from it; raises if the rows do not suit its head.

    index    retrieval and knn: the model that embeds the passages, once for all models
    prefix   of an encoder-decoder's sources; default: that of its configuration
    teacher  encoder-decoders: the dense model, for agreement and for generating missing targets
    """
    task = task_of(model, task).judged_by(metric)
    check_head(model, task)
    if task.kind == "seq2seq" and model.main_input_name != "input_ids":
        raise DataError(
            f"{type(model).__name__} generates text from audio or images, which cannot be scored here; compare the "
            "texts that it generates yourself. Pruning works without --eval."
        )
    encoder = make_encoder(
        tokenizer, task, model.config, max_length=max_length, labels=_LABELS.get(task.kind, "require"),
        text_columns=text_columns, label_column=label_column, pooling=pooling_of(model), model=teacher or model,
        prefix=prefix,
    )  # fmt: skip
    if task.kind in ("retrieval", "rerank"):
        chosen = first_queries(as_rows(rows), task, limit, text_columns)
    else:
        chosen = as_rows(rows, limit=limit)
    exam = Exam(encoder, chosen, batch_size)
    if teacher is not None and task.kind == "seq2seq":
        exam = replace(exam, said=next_tokens(exam, _run_by(teacher))[..., 1])
    if index is None:
        return exam
    if task.kind not in ("retrieval", "knn"):
        raise InputError(f"an index is of use with the tasks retrieval and knn only, not with {task.name}")
    return replace(exam, index=exam.embed_index(_run_by(index)))


def _run_by(model: PreTrainedModel) -> Predict:
    return lambda batches, read: predict(model, batches, read=read, device=None)


def output_reader(model: PreTrainedModel) -> OutputReader:
    """A function that extracts the predictions from a model's outputs, for any head.

    Logits [examples, classes] or [examples, tokens, classes]; start and end logits stacked to [examples, tokens, 2];
    without a head, embeddings [examples, hidden] by the model's own pooling.
    """
    pooling = pooling_of(model)

    def read(outputs: Any, batch: Tensors) -> torch.Tensor:
        head = head_of(outputs)
        if head == "span":
            return torch.stack([outputs[end] for end in ENDS], dim=-1)
        if head == "embedding":
            return pool(outputs, batch.get("attention_mask"), pooling)
        return torch.as_tensor(outputs["logits"])

    return read


@torch.no_grad()
def predict(
    model: PreTrainedModel,
    batches: Sequence[Tensors],
    *,
    read: OutputReader | Writer | None = None,
    device: str | torch.device | None = "auto",
    compile: bool = False,  # noqa: A002
    progress: Progress = silent,
) -> torch.Tensor:
    """Run the model and apply `read` to its outputs: CPU, float32, one row per example in the order of the data.

    `read` defaults to `output_reader`. Plain lists of dicts keep their order. Examples of different lengths are padded
    with zeros.
    """
    if not batches:
        raise DataError("there are no batches to run the model on; give at least one")
    parts: list[torch.Tensor] = []
    read = read or output_reader(model)
    with _ready(model, device) as place:
        forward = torch.compile(model, dynamic=True) if compile else model
        for done, batch in enumerate(batches, start=1):
            moved = {name: tensor.to(place) for name, tensor in batch.items()}
            inputs = {name: tensor for name, tensor in moved.items() if name not in LABELS}
            if isinstance(read, Writer):
                source = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
                part = write(model, source, read.longest, read.start)[..., None]
            else:
                with told_what_is_refused(model):
                    outputs = forward(**inputs)
                part = read(outputs, moved)
            parts.append(part.float().cpu())
            progress(done, len(batches))
    return _in_order(parts, batches)


def _in_order(parts: list[torch.Tensor], batches: Sequence[Tensors]) -> torch.Tensor:
    """Concatenate the parts, check that they are finite, and undo the bucketing."""
    bad = sum(int((~part.isfinite()).flatten(1).any(dim=1).sum()) for part in parts)
    if bad:
        total = sum(len(part) for part in parts)
        raise ModelError(
            f"the outputs of the model are NaN or Inf for {bad} of {total} examples; "
            "the checkpoint is damaged, or its dtype overflows (try float32)"
        )
    if parts[0].dim() > 2:  # [examples, tokens, ...]
        longest = max(part.shape[1] for part in parts)
        parts = [F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts]
    joined = torch.cat(parts)
    if not isinstance(batches, Batches):
        return joined
    result = torch.empty_like(joined)
    result[torch.from_numpy(batches.order)] = joined
    return result


@contextmanager
def _ready(model: PreTrainedModel, device: str | torch.device | None) -> Iterator[torch.device]:
    """The model in evaluation mode on the device; restored afterwards."""
    home = device_of(model)
    place = _place(model, device, home)
    with frozen(model):
        try:
            if place != home:
                model.to(place)
            yield place
        finally:
            if place != home:
                model.to(home)


def _place(model: PreTrainedModel, device: str | torch.device | None, home: torch.device) -> torch.device:
    if device is None or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return home  # a model on several devices stays there
    place = named_device(str(device))
    return home if place.type == home.type and place.index is None else place
