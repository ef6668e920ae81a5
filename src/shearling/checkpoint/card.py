"""The model card: front matter for the Hub, then text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shearling.report.facts import FOOTNOTE, facts_of, kinds_of, scores_of
from shearling.report.page import template

# Copied from the source's card.
CARRIED = ("license", "license_name", "license_link", "language", "datasets", "metrics", "pipeline_tag", "widget")
TAGS = ("shearling", "pruned")
OTHERS = {"ForMultipleChoice": "multiple-choice", "Model": "feature-extraction"}  # not in TASK_MAPPING
MEASURED = ("<!-- shearling: measured -->", "<!-- shearling: end -->")


def source_facts(source: Any, name: str | None) -> dict[str, Any]:
    """The front matter of the source's card, from its directory or the Hub."""
    path: Path | None = None
    if isinstance(source, (str, os.PathLike)):
        path = Path(source) / "README.md"
    elif name and Path(name).is_dir():
        path = Path(name) / "README.md"
    elif name:
        path = _cached_card(name)
    facts = front_matter(path.read_text(encoding="utf-8", errors="replace")) if path and path.is_file() else {}
    if name and not Path(name).exists() and name.count("/") <= 1:
        facts["base_model"] = name
    return facts


def _cached_card(name: str) -> Path | None:
    """The card of a Hub model, fetched if there is a network; None if that fails."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "README.md"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def front_matter(text: str) -> dict[str, Any]:
    """The YAML between the first two `---` lines; empty if it is missing or invalid."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    if not text.lstrip("\ufeff").startswith("---") or "\n---" not in text:
        return {}
    try:
        card: Any = ModelCard(text.lstrip("\ufeff"), ignore_metadata_errors=True)
        return dict(card.data.to_dict())
    except (YAMLError, ValueError):
        return {}


def carried_over(facts: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The front matter of the new card, from the source's."""
    tags = facts.get("tags") or []
    kept = {key: facts[key] for key in CARRIED if facts.get(key)}
    if facts.get("base_model"):
        kept["base_model"] = facts["base_model"]
    if pipeline := _pipeline_of(architecture):
        kept.setdefault("pipeline_tag", pipeline)
    own = [tags] if isinstance(tags, str) else list(tags)
    return {"library_name": "transformers", **kept, "tags": [*own, *(tag for tag in TAGS if tag not in own)]}


def _pipeline_of(architecture: str) -> str | None:
    """The pipeline tag of a model class, as in transformers' own cards."""
    from transformers.modelcard import TASK_MAPPING

    known = (tag for tag, classes in TASK_MAPPING.items() if architecture in classes.values())
    return next(known, None) or next((tag for ending, tag in OTHERS.items() if architecture.endswith(ending)), None)


def model_card(record: dict[str, Any]) -> str:
    """The card as Markdown with front matter."""
    from huggingface_hub import EvalResult, ModelCardData

    facts, scores = facts_of(record), scores_of(record)
    front = dict(record.get("card") or carried_over({}, str(record.get("architecture", ""))))
    kind = str(front.get("pipeline_tag") or "other")
    results = [
        EvalResult(kind, dataset_type=score["task"] or "unknown", dataset_name=score["task"] or "unknown",
                   metric_type=score["metric"], metric_value=round(float(score["value"]), 4))
        for score in scores
    ]  # fmt: skip
    index: dict[str, Any] = {"model_name": facts.title, "eval_results": results} if results else {}
    return template("card.md").render(
        **_context(record), front=ModelCardData(**front, **index).to_yaml(), kinds=kinds_of(facts.layers),
        base=(record.get("card") or {}).get("base_model"), auto=record.get("auto_class") or "AutoModel",
    )  # fmt: skip


def refreshed(text: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """A card after new measurements: rewritten, or only its marked part if a user has edited the rest."""
    if not text or text == model_card(before):
        return model_card(after)
    start, end = (text.find(mark) for mark in MEASURED)
    if not 0 <= start < end:
        return text  # the marks were removed
    return text[:start] + measured(after) + text[end + len(MEASURED[1]) :]


def measured(record: dict[str, Any]) -> str:
    """The table of scores and costs, between marks so that it can be updated."""
    return template("measured.md").render(_context(record))


def _context(record: dict[str, Any]) -> dict[str, Any]:
    """The variables of both templates."""
    scored = bool(scores_of(record))
    return {"record": record, "facts": facts_of(record), "scored": scored, "marks": MEASURED, "footnote": FOOTNOTE}
