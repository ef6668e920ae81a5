"""The model card: what the Hub reads on top, what people read below."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shearling.report.record import retraining_line, short

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
    import yaml

    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], start=1) if line.strip() == "---"), None)
    try:
        value = yaml.safe_load("\n".join(lines[1:end])) if end else None
    except yaml.YAMLError:
        return {}
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}


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
    import yaml

    facts = dict(record.get("card") or carried_over({}, str(record.get("architecture", ""))))
    evaluations = record.get("evaluations") or []
    if evaluations:
        facts["model-index"] = [_model_index(record, evaluations, facts)]
    head = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, default_flow_style=False).rstrip()
    parts = [
        f"---\n{head}\n---",
        f"# {title(record)}",
        _summary(record),
        "## Measured\n\n" + measured(record),
        "## What stayed\n\n" + _layers(record),
        "## How to load it\n\n" + _loading(record),
        "## How it was made\n\n" + _provenance(record),
        "## Limits\n\n" + _limits(record),
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


def title(record: dict[str, Any]) -> str:
    """`bert-base-uncased, pruned to 50% of its FLOPs`, and whether it was retrained."""
    base = str(record.get("base") or record["model_type"]).rstrip("/").rpartition("/")[2]
    return f"{base}, pruned to {constraint(record)}" + (" and retrained" if record.get("retrained") else "")


def constraint(record: dict[str, Any]) -> str:
    """`50% of its FLOPs and 60% of its parameters`."""
    words = {"flops": "FLOPs", "params": "parameters", "latency": "latency"}
    return " and ".join(f"{ratio:.4g}% of its {words.get(name, name)}" for name, ratio in _percent(record))


def _percent(record: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, 100 * ratio) for name, ratio in record["constraint"].items()]


def _summary(record: dict[str, Any]) -> str:
    facts = record.get("card") or {}
    base = facts.get("base_model")
    linked = f" [{base}](https://huggingface.co/{base})" if isinstance(base, str) else " a fine-tuned model"
    retrained = "and then retrained" if record.get("retrained") else "without retraining"
    return (
        f"This is{linked} with attention heads and FFN filters removed by shearling "
        f"{record.get('versions', {}).get('shearling', '')}, {retrained}. It is an ordinary, smaller dense "
        f"`{record.get('architecture') or record['model_type']}`: no masks, no sparse kernels."
    )


def measured(record: dict[str, Any]) -> str:
    """The table of costs and scores, between marks so that it can be brought up to date."""
    rows = ["| | dense | pruned | |", "|---|---|---|---|"]
    for entry in record.get("evaluations") or []:
        dense = f"{entry['dense']:.2f}" if isinstance(entry.get("dense"), (int, float)) else "not measured"
        note = f"{entry['examples']:,} examples" + (f", exact match {entry['em']:.2f}" if "em" in entry else "")
        rows.append(f"| {entry['metric']}, {entry['task']} | {dense} | **{entry['value']:.2f}** | {note} |")
    names = {
        "flops": "multiply-accumulates, layers",
        "flops_model": "multiply-accumulates, model",
        "params": "parameters, layers",
        "params_model": "parameters, model",
    }
    for key, label in names.items():
        if key in record:
            cost = record[key]
            rows.append(f"| {label} | {short(cost['dense'])} | {short(cost['pruned'])} | {cost['ratio']:.1%} |")
    latency = record.get("latency")
    if isinstance(latency, dict) and latency.get("measured"):
        rows.append(f"| latency, {latency.get('device', 'one device')} | 1 | {latency['measured']:.3f} | measured |")
    if not record.get("evaluations"):
        rows.append("\nAccuracy was not measured; `shearling evaluate DIR --data FILE --record` adds it here.")
    rows += [_export_line(entry) for entry in record.get("exports") or []]
    return "\n".join([MEASURED[0], *rows, MEASURED[1]])


def _export_line(entry: dict[str, Any]) -> str:
    """`Exported as model.onnx (onnx, int8, 14.2 MB), 0.98 of the predictions equal under ONNX Runtime 1.31.1.`"""
    same = entry.get("agreement")
    agreed = "" if same is None else f", {same:.1%} of the predictions equal"
    about = f"{entry['format']}, {entry['precision']}, {entry['bytes'] / 1e6:.1f} MB"
    return f"\nExported as `{entry['out']}` ({about}), checked under {entry['runtime']}{agreed}."


def _layers(record: dict[str, Any]) -> str:
    kinds = list(dict.fromkeys(kind for layer in record["dense_layers"] for kind in layer))
    rows = ["| layer | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for depth, (now, before) in enumerate(zip(record["layers"], record["dense_layers"], strict=True)):
        cells = (f"{now.get(kind, 0)} of {before[kind]}" if kind in before else "" for kind in kinds)
        rows.append(f"| {depth} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


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


def _provenance(record: dict[str, Any]) -> str:
    sample, seconds = record.get("sample", {}), record.get("seconds", {})
    lines = [f"- method: `{record['method']}`" + (", label-free" if _label_free(record) else "")]
    lines.append(f"- constraint: {constraint(record)}")
    if sample:
        lines.append(
            f"- sample: {sample['examples']:,} examples of {sample['mean_length']:.0f} tokens on average, seed "
            f"{record.get('seed')}, sha256 `{str(sample['fingerprint'])[:16]}`"
        )
    if "total" in seconds:
        lines.append(f"- time: {seconds['total']:.1f} s")
    if record.get("retrained"):
        lines.append(f"- retraining: {retraining_line(record['retrained'])}")
    versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    return "\n".join([*lines, *([f"- versions: {versions}"] if versions else [])])


def _label_free(record: dict[str, Any]) -> bool:
    labels = record.get("settings", {}).get("labels") or record.get("retrained")
    return record["method"] == "surgeon" and not labels


def _limits(record: dict[str, Any]) -> str:
    lines = [
        "- It was pruned for data like the sample; on other data it may lose more than the table says.",
        "- It inherits the limits and biases of the model it was made from, and its licence.",
    ]
    if "latency" not in record["constraint"]:
        lines.append("- The constraint counts operations; what it gains in time depends on device, batch and length.")
    lines += [f"- {warning}" for warning in record.get("warnings", [])]
    return "\n".join(lines)


def _model_index(record: dict[str, Any], evaluations: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """Scores in the form the Hub's leaderboards read."""
    kind = facts.get("pipeline_tag", "other")
    results = [
        {
            "task": {"type": kind},
            "dataset": {"name": entry["task"], "type": entry["task"]},
            "metrics": [{"type": entry["metric"], "value": round(float(entry["value"]), 4)}],
        }
        for entry in evaluations
    ]
    return {"name": title(record), "results": results}
