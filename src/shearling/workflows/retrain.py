"""`shearling retrain`: fine-tune a pruned checkpoint and write a new one."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shearling._version import versions
from shearling.checkpoint.companions import copy_companions
from shearling.checkpoint.load import read_record
from shearling.checkpoint.pretrained import load_model
from shearling.data.encoder import make_encoder
from shearling.engine.progress import Watcher
from shearling.errors import ModelError, OutputError
from shearling.files import RECORD, check_writable, json_text, whole_directory
from shearling.models.digest import weights_digest_of
from shearling.schema import CONFIG
from shearling.workflows.evaluate import known_dense
from shearling.workflows.progress import quiet
from shearling.workflows.source import Source, exam_of, open_source, rows_of
from shearling.workflows.training import Recipe, check_alone, last_checkpoint, plain_device, retrain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STAGES = {"evaluate": 10.0, "retrain": 90.0}
# Entries of the record about the old weights.
STALE = ("agreement", "curve", "evaluation", "evaluations", "exports", "max_drop")


def retrain_source(
    source: Source,
    recipe: Recipe,
    out: Path,
    *,
    teacher: str | None = None,
    evaluation: str | None = None,
    limit: int | None = None,
    force: bool = False,
    watcher: Watcher = quiet,
) -> dict[str, Any]:
    """Retrain a checkpoint; returns the record of `--json`, with the metric before and after if measured."""
    check_alone()
    place = plain_device(source.device)
    record = read_record(Path(source.model))
    check_writable(out, force=force, keep=(source.model,))
    # Training is in float32, since small steps underflow in half precision; the result has the checkpoint's dtype.
    loaded = open_source(replace(source, device="cpu", dtype="float32"), evaluation)
    model, task = loaded.model, loaded.task
    guide = None if teacher is None else _teacher(teacher, model, source.trust_remote_code)
    encoder = make_encoder(
        loaded.tokenizer, task, model.config, max_length=source.max_length,
        labels="ignore" if task.head == "embedding" else "require", text_columns=source.text_columns,
        label_column=source.label_column, seed=recipe.seed, model=model,
    )  # fmt: skip
    exam = None if evaluation is None else exam_of(source, loaded, evaluation, limit=limit, dense=model)
    rows = rows_of(source.data, task)
    progress = partial(watcher, "evaluate")
    before = None if exam is None else exam.take(model, device=place, progress=progress)
    begun = [str(Path(source.model).resolve()), weights_digest_of(model), rows.fingerprint()]
    work = _work_folder(out, source, begun, recipe, teacher, force=force)
    try:
        trained = retrain(model, encoder, rows, recipe, work=work, teacher=guide, device=source.device, watcher=watcher)
    except BaseException:
        if last_checkpoint(work) is None:  # nothing to resume from
            shutil.rmtree(work, ignore_errors=True)
        raise
    after = None if exam is None else exam.take(model, device=place, progress=progress)
    facts = {
        **asdict(recipe), "task": task.name, "examples": len(rows), "teacher": teacher, **asdict(trained),
        "before": before and before.to_json(), "after": after and after.to_json(), "versions": versions(),
    }  # fmt: skip
    if guide is None:
        del facts["alpha"], facts["temperature"], facts["hidden"]
    write_retrained(model, Path(source.model), out, record, facts, force=force)
    shutil.rmtree(work, ignore_errors=True)
    return {"retrained": facts, "model": source.model, "out": str(out)}


def write_retrained(
    model: PreTrainedModel, source: Path, out: Path, record: dict[str, Any], facts: dict[str, Any], *, force: bool
) -> None:
    """Write the checkpoint with new weights; tokenizer, code and card are copied, the record is updated."""
    from shearling.checkpoint.card import refreshed

    config = CONFIG.read(source / "config.json")
    kind = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    updated = {k: v for k, v in record.items() if k not in STALE} | {"retrained": facts} | _scored(record, facts)
    if "retrained" in record:
        updated["retrained"] = facts | {"earlier": record["retrained"]}
    base = record.get("base") or ""
    if base.startswith("."):  # a path relative to the checkpoint
        updated["base"] = os.path.relpath(os.path.normpath(source.resolve() / base), out.resolve())
    with whole_directory(out, force=force, keep=(source,)) as folder:
        model.to("cpu", kind).save_pretrained(folder)
        copy_companions(source, folder)
        for path in (*source.glob("*.py"), *source.glob("README.md")):
            shutil.copyfile(path, folder / path.name)
        card = folder / "README.md"
        if card.is_file():
            card.write_text(refreshed(card.read_text(encoding="utf-8"), record, updated), encoding="utf-8")
        (folder / RECORD).write_text(json_text(updated), encoding="utf-8")


def _scored(record: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The score after retraining replaces the earlier ones; the dense model's score is kept."""
    before, after = facts.get("before"), facts.get("after")
    if not before or not after:
        return {}
    dense = known_dense(record, before)
    return {"evaluations": [after if dense is None else after | {"dense": dense}]}


def _teacher(name: str, model: PreTrainedModel, trust_remote_code: bool) -> PreTrainedModel:
    teacher = load_model(name, device="cpu", dtype="float32", trust_remote_code=trust_remote_code)
    for fact in ("vocab_size", "num_labels"):
        theirs, mine = getattr(teacher.config, fact, None), getattr(model.config, fact, None)
        if theirs != mine:
            raise ModelError(
                f"The teacher {name} has {fact} {theirs}, the pruned model {mine}; give the dense model it came from."
            )
    return teacher.requires_grad_(False)


def _work_folder(
    out: Path, source: Source, begun: list[str], recipe: Recipe, teacher: str | None, *, force: bool
) -> Path:
    """The hidden folder beside `out` for training checkpoints, valid for these settings only.

    begun  the model, its weights and the rows
    """
    target = out.resolve()
    work = target.with_name(f".{target.name}.retrain")
    reading = [source.task, source.max_length, source.text_columns, source.label_column]
    settings = json.dumps([begun, reading, asdict(recipe), teacher], sort_keys=True)
    note = work / "settings.json"
    if note.is_file() and note.read_text(encoding="utf-8") != settings:
        if not force and last_checkpoint(work) is not None:
            raise OutputError(
                f"{work} has an interrupted retraining with other settings; give the same ones to resume it, choose "
                "another place, or start afresh with force (--force, force=True)."
            )
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    note.write_text(settings, encoding="utf-8")
    return work
