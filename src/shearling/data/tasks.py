"""The table of tasks: columns of texts and labels, maximum length and metric of each."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shearling.errors import DataError, InputError, ModelError
from shearling.sample.read import reads_targets

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Kind = Literal[
    "classification", "regression", "token-classification", "question-answering", "embedding", "retrieval", "rerank",
    "lm", "seq2seq", "knn",
]  # fmt: skip
# The metrics of each kind of task.
METRICS: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("spearman", "pearson"),
    "token-classification": ("f1",),
    "question-answering": ("f1",),
    "embedding": ("spearman", "pearson"),
    "retrieval": ("ndcg@10", "mrr@10", "r@1", "r@10"),
    "rerank": ("ndcg@10", "mrr@10", "auc"),
    "lm": ("perplexity",),
    "seq2seq": ("perplexity", "agreement", "rouge-l"),
    "knn": ("accuracy",),
}


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face Hub and the names of its splits."""

    dataset: str
    config: str | None = None
    train: str = "train"
    dev: str = "validation"


@dataclass(frozen=True)
class Task:
    """One row of the table."""

    name: str
    kind: Kind
    text: tuple[tuple[str, ...], ...]
    """Column names to look for, the first match is used; two names are a sentence pair."""
    label: tuple[str, ...]
    metric: str
    max_length: int
    stride: int = 0
    classes: tuple[str, ...] = ()
    """Class names in the order of the data set's integers."""
    hub: Hub | None = None

    @property
    def head(self) -> Kind:
        """The kind of task of the model's head."""
        heads: dict[Kind, Kind] = {"retrieval": "embedding", "rerank": "regression", "knn": "embedding"}
        return heads.get(self.kind, self.kind)

    def judged_by(self, metric: str | None) -> Task:
        """The same task with another metric of its kind, ignoring case."""
        if metric is None:
            return self
        known = METRICS[self.kind]
        if metric.lower() not in known:
            raise InputError(f"task {self.name} has no metric {metric!r}; it has {', '.join(known)}")
        return replace(self, metric=metric.lower())


_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("query", "passage"),
)
_SINGLES = (("text",), ("sentence",), ("content",), ("review",), ("document",), ("title",))
_CLASS = ("label", "labels", "class", "target", "category", "sentiment", "intent")
_SCORE = ("label", "labels", "score", "similarity_score", "similarity", "target", "rating")
_TAGS = ("ner_tags", "tags", "labels", "ner", "pos_tags", "label")
_QA = (("question", "context"),)
_SEARCH = (("query", "passage"), ("query", "document"), ("query", "text"), ("question", "context"),
           ("question", "passage"), ("question", "answer"), ("anchor", "positive"), *_PAIRS[:-1])  # fmt: skip
_RELEVANCE = ("relevance", "label", "labels", "score", "is_relevant", "is_selected")
_ENTAILED = ("entailment", "not_entailment")


def _glue(name: str, *columns: str, kind: Kind = "classification", metric: str = "accuracy", max_length: int = 128,
          classes: tuple[str, ...] = (), dev: str = "validation") -> Task:  # fmt: skip
    """A task of GLUE: its own column names first, then those of other releases of the data."""
    text = (columns, ("sentence1", "sentence2")) if len(columns) == 2 else (columns, ("text",))
    return Task(name, kind, text, ("label",), metric, max_length, 0, classes, Hub("nyu-mll/glue", name, dev=dev))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("mnli", "premise", "hypothesis", classes=("entailment", "neutral", "contradiction"),
              dev="validation_matched"),
        _glue("qqp", "question1", "question2", classes=("not_duplicate", "duplicate")),
        _glue("qnli", "question", "sentence", classes=_ENTAILED),
        _glue("sst2", "sentence", classes=("negative", "positive"), max_length=64),
        _glue("stsb", "sentence1", "sentence2", kind="regression", metric="spearman"),
        _glue("mrpc", "sentence1", "sentence2", classes=("not_equivalent", "equivalent")),
        _glue("rte", "sentence1", "sentence2", classes=_ENTAILED),
        _glue("cola", "sentence", metric="matthews", classes=("unacceptable", "acceptable"), max_length=64),
        Task("squad", "question-answering", _QA, ("answers",), "f1", 384, 128, hub=Hub("rajpurkar/squad")),
        Task("squad_v2", "question-answering", _QA, ("answers",), "f1", 384, 128, hub=Hub("rajpurkar/squad_v2")),
        # Generic tasks, one per kind and named after it.
        Task("classification", "classification", _PAIRS + _SINGLES, _CLASS, "accuracy", 512),
        Task("regression", "regression", _PAIRS + _SINGLES, _SCORE, "spearman", 512),
        Task("token-classification", "token-classification", (("tokens",), ("words",)), _TAGS, "f1", 512),
        Task("question-answering", "question-answering", _QA, ("answers",), "f1", 384, 128),
        Task("embedding", "embedding", _PAIRS + _SINGLES, _SCORE, "spearman", 512),
        Task("sts", "embedding", _PAIRS + _SINGLES, _SCORE, "spearman", 512),
        Task("retrieval", "retrieval", _SEARCH, _RELEVANCE, "ndcg@10", 512),
        Task("rerank", "rerank", _SEARCH, _RELEVANCE, "ndcg@10", 512),
        Task("lm", "lm", _SINGLES, (), "perplexity", 512),
        Task("seq2seq", "seq2seq", _SINGLES, (), "perplexity", 512),  # data/seq2seq.py looks for its columns
        Task("knn", "knn", _SINGLES, _CLASS, "accuracy", 512),
    )
}  # fmt: skip

# Suffix of a model class and the kind of its head. Order matters: LMHeadModel ends in Model.
_HEADS: tuple[tuple[str, Kind], ...] = (
    ("ForSequenceClassification", "classification"),
    ("ForImageClassification", "classification"),
    ("ForImageClassificationWithTeacher", "classification"),
    ("ForAudioClassification", "classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForMaskedLM", "lm"),
    ("ForCausalLM", "lm"),
    ("LMHeadModel", "lm"),
    ("Model", "embedding"),
)
# Heads for images and audio whose outputs no metric here reads.
_UNSCORED = (
    "ForCTC", "ForXVector", "ForAudioFrameClassification", "ForPreTraining", "ForMaskedImageModeling", "Backbone",
    "ForSemanticSegmentation", "ForObjectDetection", "ForDepthEstimation",
)  # fmt: skip


def find_task(name: Task | str) -> Task:
    """Look a task up by name, ignoring case and punctuation (SST-2)."""
    if isinstance(name, Task):
        return name
    by_letters = {_letters(known): task for known, task in TASKS.items()}
    task = by_letters.get(_letters(name))
    if task is None:
        near = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.5)
        hint = f"did you mean {by_letters[near[0]].name}? " if near else ""
        raise InputError(f"there is no task {name!r}; {hint}The tasks are {', '.join(TASKS)}")
    return task


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def infer_task(model: PreTrainedModel) -> Task:
    """The generic task of the model's head; for images and audio, any head can be pruned, if not scored."""
    name, texts = type(model).__name__, model.main_input_name == "input_ids"
    kind = next((kind for ending, kind in _HEADS if name.endswith(ending)), None)
    if reads_targets(model) and (kind is None or texts):
        kind = "seq2seq"
    elif kind in (None, "embedding") and not texts:
        kind = "knn" if kind else "embedding"  # of a task that reads no labels
    if kind is None:
        raise ModelError(f"the head of {name} does not say its task; pass --task, one of {', '.join(TASKS)}")
    if kind == "classification":
        problem = getattr(model.config, "problem_type", None)
        if model.config.num_labels == 1 or problem == "regression":
            kind = "regression"
    return TASKS[kind]


def task_of(model: PreTrainedModel, asked: Task | str | None) -> Task:
    """The requested task, or that of the model's head."""
    return find_task(asked) if asked else infer_task(model)


def several_labels(config: PretrainedConfig) -> bool:
    """Whether an example has several labels at once, which no task here reads."""
    return getattr(config, "problem_type", None) == "multi_label_classification"


def check_scored(model: PreTrainedModel | None) -> None:
    """Raise if no metric here reads what the model's head gives."""
    if type(model).__name__.endswith(_UNSCORED) and getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise DataError(
            f"{type(model).__name__} gives neither classes nor embeddings, and what it gives cannot be scored here; "
            "compare it yourself. Pruning works without --eval."
        )


def check_head(model: PreTrainedModel, task: Task) -> None:
    """Raise if the model's head does not suit the task."""
    if several_labels(model.config):
        raise ModelError(
            f"this {type(model).__name__} predicts several labels per example, which no task here scores; prune it "
            "without labels and without --eval"
        )
    try:
        found = infer_task(model).head
    except ModelError:
        return  # unknown head: trust the requested task
    if found != task.head:
        raise ModelError(
            f"task {task.name} needs a model for {task.head}, but {type(model).__name__} with "
            f"{model.config.num_labels} label(s) is for {found}; give another model or --task {found}"
        )
