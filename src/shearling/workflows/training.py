"""Fine-tuning with `Trainer`; with a teacher, also by distillation."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.checkpoint.pretrained import named_device
from shearling.engine.distance import divergence
from shearling.engine.distil import variance
from shearling.engine.distributed import rank_and_world
from shearling.engine.head import ENDS, head_of
from shearling.engine.losses import token_mask
from shearling.engine.progress import Watcher
from shearling.engine.silence import quiet_transformers
from shearling.errors import InputError
from shearling.workflows.progress import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.data.batches import Tokenized
    from shearling.data.encoder import Encoder
    from shearling.data.rows import Rows

TARGETS = ("labels", "start_positions", "end_positions")
CHECKPOINTS = 10  # per run
WHOLE = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "model.safetensors")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters; the defaults are the paper's.

    alpha, temperature  with a teacher: weight of its outputs against the labels, and softmax temperature
    hidden              with a teacher: weight of the hidden states
    """

    epochs: float = 3.0
    lr: float = 2e-5
    batch_size: int = 32
    seed: int = 0
    alpha: float = 0.5
    temperature: float = 2.0
    hidden: float = 1.0

    def __post_init__(self) -> None:
        """Validate."""
        if not self.epochs > 0:
            raise InputError(f"{self.epochs:g} epochs were asked for; give more than 0, the paper takes 3.")
        if not 0 < self.lr < 1:
            raise InputError(f"A learning rate of {self.lr:g} makes no sense; 2e-5 is the paper's.")
        if not 0 <= self.alpha <= 1 or not self.temperature > 0 or not self.hidden >= 0:
            raise InputError("alpha is a share in [0, 1], the temperature is above 0, hidden is a weight from 0 on.")


@dataclass(frozen=True)
class Trained:
    """Statistics of the training."""

    steps: int
    loss: float
    seconds: float
    resumed_from: int


def retrain(
    model: PreTrainedModel,
    encoder: Encoder,
    rows: Rows,
    recipe: Recipe,
    *,
    work: Path | None = None,
    teacher: PreTrainedModel | None = None,
    device: str = "auto",
    watcher: Watcher = quiet,
) -> Trained:
    """Train `model` in place on `rows`; resumes from the last checkpoint in the `work` folder, if any."""
    check_alone()
    examples = encoder.tokenize(rows)
    if teacher is None and not {*examples.tokens, *examples.values} & {*TARGETS}:
        raise InputError(f"Task {encoder.task.name} has no labels to learn from; give --teacher.")
    trainer = _trainer(model, encoder, examples, recipe, work, teacher, device, watcher)
    last = None if work is None else last_checkpoint(work)
    began = time.perf_counter()
    with quiet_transformers():
        result = trainer.train(resume_from_checkpoint=None if last is None else str(last))
    model.eval()
    return Trained(
        steps=int(result.global_step),
        loss=float(result.training_loss),
        seconds=time.perf_counter() - began,
        resumed_from=0 if last is None else int(last.name.split("-")[-1]),
    )


def distillation_loss(student: Any, teacher: Any, batch: dict[str, Tensor], temperature: float) -> Tensor:
    """Distance of the outputs: KL divergence of softened classes, squared error of numbers."""
    head = head_of(student)
    names = {"span": ENDS, "embedding": ("last_hidden_state",)}.get(head, ("logits",))
    losses = []
    for mine, theirs in ((student[name], teacher[name]) for name in names):
        real = token_mask(batch, mine) if mine.dim() == 3 else None
        if real is not None:
            mine, theirs = mine[real.bool()], theirs[real.bool()]
        if head == "embedding" or mine.shape[-1] == 1:
            losses.append(F.mse_loss(mine, theirs))
            continue
        # The factor makes the gradient's scale independent of the temperature.
        losses.append(divergence(mine.float() / temperature, theirs.float() / temperature).mean() * temperature**2)
    return torch.stack(losses).mean()


def hidden_loss(student: Any, teacher: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean over layers of squared error / teacher's variance of the hidden states, as in polish."""
    errors = []
    for name, mask in (("hidden_states", "attention_mask"), ("encoder_hidden_states", "attention_mask"),
                       ("decoder_hidden_states", "decoder_attention_mask")):  # fmt: skip
        mine, theirs = (outputs.get(name) or () for outputs in (student, teacher))
        if len(mine) != len(theirs):  # layers were removed
            continue
        for s, t in list(zip(mine, theirs, strict=True))[1:]:
            real = batch.get(mask)
            real = real.bool() if real is not None and real.shape == s.shape[:2] else None
            pair = (s, t) if real is None else (s[real], t[real])
            errors.append(F.mse_loss(*pair) / variance(t, real))
    return torch.stack(errors).mean() if errors else torch.zeros((), device=next(iter(batch.values())).device)


def _trainer(
    model: PreTrainedModel,
    encoder: Encoder,
    examples: Tokenized,
    recipe: Recipe,
    work: Path | None,
    teacher: PreTrainedModel | None,
    device: str,
    watcher: Watcher,
) -> Any:
    try:
        import accelerate  # noqa: F401 - required by Trainer
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    except ImportError:
        raise InputError("Retraining needs accelerate; run: pip install shearling[train].") from None

    class Watching(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watcher("retrain", state.global_step, state.max_steps)

    class Distilling(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if teacher is None:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            outputs = model(**inputs, output_hidden_states=True)
            teacher.to(next(model.parameters()).device)
            unlabelled = {name: tensor for name, tensor in inputs.items() if name not in TARGETS}
            with torch.no_grad():
                wanted = teacher(**unlabelled, output_hidden_states=True)
            loss = distillation_loss(outputs, wanted, inputs, recipe.temperature)
            loss = loss + recipe.hidden * hidden_loss(outputs, wanted, inputs)
            if outputs.get("loss") is not None:
                loss = recipe.alpha * loss + (1 - recipe.alpha) * outputs["loss"]
            return (loss, outputs) if return_outputs else loss

    def collate(numbers: Sequence[int]) -> dict[str, Tensor]:
        chosen = examples.select(np.array(numbers, dtype=np.int64))
        return encoder.batches(chosen, len(numbers), bucket=False)[0]

    steps = -(-len(examples) // recipe.batch_size) * recipe.epochs
    arguments = TrainingArguments(
        output_dir=str(work or tempfile.gettempdir()),  # unused with save_strategy="no"
        num_train_epochs=recipe.epochs,
        learning_rate=recipe.lr,
        per_device_train_batch_size=recipe.batch_size,
        seed=recipe.seed,
        save_strategy="no" if work is None else "steps",
        save_steps=max(1, int(steps) // CHECKPOINTS),
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=plain_device(device).type == "cpu",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # prevents DataParallel, which would change the batch size
    trainer = Distilling(
        model=model,
        args=arguments,
        train_dataset=range(len(examples)),  # indices; the collator looks examples up and pads
        data_collator=collate,
        callbacks=[Watching()],
    )
    trainer.remove_callback(PrinterCallback)  # stdout is for the result
    return trainer


def last_checkpoint(work: Path) -> Path | None:
    """The newest complete checkpoint."""
    found = [p for p in work.glob("checkpoint-*") if all((p / name).is_file() for name in WHOLE)]
    return max(found, key=lambda p: int(p.name.split("-")[-1]), default=None)


def plain_device(name: str) -> torch.device:
    """The device, which for `Trainer` is the CPU or the first visible GPU."""
    device = named_device(name)
    if device.index not in (None, 0):
        raise InputError(f"Retraining runs on the first GPU it sees; say CUDA_VISIBLE_DEVICES={device.index} instead.")
    return device


def check_alone() -> None:
    """Raise under a launcher: with several processes, `Trainer` would increase the effective batch size."""
    size = os.environ.get("WORLD_SIZE", "1")
    world = max(int(size) if size.isdecimal() else 1, rank_and_world()[1])
    if world > 1:
        raise InputError(
            f"Retraining runs in one process, on one GPU; a launcher started {world} of them. "
            "Run it without torchrun or accelerate launch."
        )
