"""The model card: metadata for the Hub at the top, text for people below."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shearling.report.facts import FOOTNOTE, Layer, facts_of, kinds_of, scores_of

# Carried over from the source's card as they are.
CARRIED = ("license", "license_name", "license_link", "language", "datasets", "metrics", "pipeline_tag", "widget")
TAGS = ("shearling", "pruned")
# How the name of a model class ends, and the pipeline its head is for.
PIPELINES = (
    ("ForSequenceClassification", "text-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForMaskedLM", "fill-mask"),
    ("ForMultipleChoice", "multiple-choice"),
    ("ForImageClassification", "image-classification"),
    ("ForAudioClassification", "audio-classification"),
    ("ForCTC", "automatic-speech-recognition"),
    ("ForSpeechSeq2Seq", "automatic-speech-recognition"),
    ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
    ("ForConditionalGeneration", "text2text-generation"),
    ("ForCausalLM", "text-generation"),
    ("LMHeadModel", "text-generation"),
    ("Model", "feature-extraction"),
)
MEASURED = ("<!-- shearling: measured -->", "<!-- shearling: end -->")


def source_facts(source: Any, name: str | None) -> dict[str, Any]:
    """The front matter of the source's own card: beside a local model, or from the Hub's cache."""
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
    """The card of a Hub model, fetched if there is a network; a missing one is no reason to fail."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "README.md"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def front_matter(text: str) -> dict[str, Any]:
    """The YAML between the first two `---` lines; empty where there is none or it is not YAML."""
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
    """What the new card's front matter says: the source's facts, and ours."""
    tags = facts.get("tags") or []
    kept = {key: facts[key] for key in CARRIED if facts.get(key)}
    if facts.get("base_model"):
        kept["base_model"] = facts["base_model"]
    pipeline = next((tag for ending, tag in PIPELINES if architecture.endswith(ending)), None)
    if pipeline:
        kept.setdefault("pipeline_tag", pipeline)
    own = [tags] if isinstance(tags, str) else list(tags)
    return {"library_name": "transformers", **kept, "tags": [*own, *(tag for tag in TAGS if tag not in own)]}


def model_card(record: dict[str, Any]) -> str:
    """Markdown with the front matter the Hub reads."""
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
    parts = [
        f"---\n{ModelCardData(**front, **index).to_yaml()}\n---",
        f"# {facts.title}",
        _summary(record),
        "## Measured\n\n" + measured(record),
        "## What stayed\n\n" + _layers(facts.layers),
        "## How to load it\n\n" + _loading(record),
        "## How it was made\n\n" + "\n".join(f"- {name}: {words}" for name, words in _public(facts.told).items()),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in [*_limits(record), *facts.notes]),
    ]
    return "\n\n".join(parts) + "\n"


def refreshed(text: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """A card after new measurements: written anew, or only its marked part where someone has edited the rest."""
    if not text or text == model_card(before):
        return model_card(after)
    start, end = (text.find(mark) for mark in MEASURED)
    if not 0 <= start < end:
        return text  # its owner has taken the marks out
    return text[:start] + measured(after) + text[end + len(MEASURED[1]) :]


def measured(record: dict[str, Any]) -> str:
    """The table of scores and costs, between marks so that it can be brought up to date."""
    facts = facts_of(record)
    rows = [f"| {row.name} | {row.dense} | **{row.pruned}** | {row.change} | {row.note} |" for row in facts.rows]
    lines = [f"| | {facts.columns[0]} | {facts.columns[1]} | | |", "|---|---|---|---|---|", *rows, "", FOOTNOTE]
    if not scores_of(record):
        lines.append("Accuracy was not measured; `shearling evaluate DIR --data FILE --record` adds it here.")
    lines += [line for entry in record.get("exports") or [] for line in ("", _export_line(entry))]
    return "\n".join([MEASURED[0], *lines, MEASURED[1]])


def _summary(record: dict[str, Any]) -> str:
    base = (record.get("card") or {}).get("base_model")
    linked = f" [{base}](https://huggingface.co/{base})" if isinstance(base, str) else " a fine-tuned model"
    retrained = "and then retrained" if record.get("retrained") else "without retraining"
    return (
        f"This is{linked} with attention heads and FFN filters removed by shearling "
        f"{record.get('versions', {}).get('shearling', '')}, {retrained}. It is an ordinary, smaller dense "
        f"`{record.get('architecture') or record['model_type']}`: no masks, no sparse kernels."
    )


def _export_line(entry: dict[str, Any]) -> str:
    """`Exported as model.onnx (onnx, int8, 14.2 MB), 98.0% of the predictions equal under ONNX Runtime 1.31.1.`"""
    same = entry.get("agreement")
    agreed = "" if same is None else f", {same:.1%} of the predictions equal"
    about = f"{entry['format']}, {entry['precision']}, {entry['bytes'] / 1e6:.1f} MB"
    return f"Exported as `{entry['out']}` ({about}), checked under {entry['runtime']}{agreed}."


def _layers(layers: Sequence[Layer]) -> str:
    kinds = kinds_of(layers)
    rows = ["| layer | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for layer in layers:
        cells = ("{} of {}".format(*layer.units[kind]) if kind in layer.units else "" for kind in kinds)
        rows.append(f"| {layer.depth} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _public(told: Mapping[str, str]) -> dict[str, str]:
    """What a card tells to strangers: not where the dense model lies on this machine."""
    return {name: words for name, words in told.items() if name != "pruned from"}


def _loading(record: dict[str, Any]) -> str:
    auto = record.get("auto_class") or "AutoModel"
    return f"""With shearling installed, plain `from_pretrained` works, and so do `pipeline(...)` and `Trainer`:

```python
import shearling  # teaches transformers to load uneven layers
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("PATH_OR_REPO")
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_REPO")
```

From a local directory, with the head it was saved with:

```python
model = shearling.load("PATH")
```

Without shearling, by the file that lies beside the weights:

```python
model = {auto}.from_pretrained("PATH_OR_REPO", trust_remote_code=True)
```"""


def _limits(record: dict[str, Any]) -> list[str]:
    lines = [
        "It was pruned for data like the sample; on other data it may lose more than the table says.",
        "It inherits the limits and biases of the model it was made from, and its licence.",
    ]
    if "latency" not in record["constraint"]:
        lines.append("The constraint counts operations; what it gains in time depends on device, batch and length.")
    return lines
