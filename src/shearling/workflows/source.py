"""Load a model and its examples from names, files and texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from shearling.checkpoint.companions import found_locally
from shearling.checkpoint.pretrained import check_prunable, is_remote, load_model, named_device
from shearling.checkpoint.sentence import attach_pooling
from shearling.data import Rows, as_rows, encode, find_task, load_task_rows, read_rows, task_of
from shearling.data.images import ImageOptions, reader_of
from shearling.data.seq2seq import reading_of
from shearling.engine.progress import Watcher
from shearling.errors import DataError, InputError, ModelError
from shearling.evaluation.exam import Exam, make_exam
from shearling.integrations.sentence_transformers import is_sentence_model, transformer_of
from shearling.methods import Method
from shearling.methods.ranges import Samples, checked_samples, checked_seed
from shearling.models.pooling import pooling_of
from shearling.sample.read import accepted_by, reads_targets
from shearling.workflows.arguments import is_text, is_transformer, needs_reading
from shearling.workflows.progress import quiet, step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.data import Task
    from shearling.data.encoder import Labels

SCORED_TOKENS = 2**16  # per batch


class Loading(TypedDict):
    """How a model is loaded by name."""

    device: str
    dtype: str | None
    trust_remote_code: bool
    pooling: str | None


@dataclass(frozen=True)
class Source:
    """A model and its data, and the options for reading them.

    model       a directory, Hub id, transformers model, SentenceTransformer or CrossEncoder
    data        a file name, texts, pairs, rows, a data set, or batches
    batch_size  for scoring; default: suited to the device
    length      tokens per example for counting FLOPs; default: the sample's mean
    metric      default: the task's usual one
    index       retrieval: `dense`, or a model that embeds the passages; default: the scored model
    pooling     of an embedding model, if its files do not have it
    tokenizer   default: the model's own
    prefix      of an encoder-decoder's sources; default: that of its configuration
    images      preprocessing of images, without a processor file
    """

    model: Any
    data: Any = None
    task: str | None = None
    _: KW_ONLY
    text_columns: Sequence[str] | None = None
    label_column: str | None = None
    max_length: int | None = None
    batch_size: int | None = None
    samples: Samples = "auto"
    seed: int = 0
    device: str = "auto"
    dtype: str | None = None
    trust_remote_code: bool = False
    length: float | None = None
    metric: str | None = None
    index: str | None = None
    pooling: str | None = None
    tokenizer: Any = None
    prefix: str | None = None
    images: ImageOptions | None = None

    def __post_init__(self) -> None:
        checked_seed(self.seed)
        if isinstance(self.text_columns, str):  # a single name
            object.__setattr__(self, "text_columns", (self.text_columns,))

    @property
    def named(self) -> bool:
        """Whether the model is given by name."""
        return isinstance(self.model, (str, os.PathLike))

    @property
    def name(self) -> str:
        """Directory or Hub id of the model; empty if unknown."""
        return str(self.model if self.named else getattr(self.model, "name_or_path", "") or "")

    @property
    def loading(self) -> Loading:
        """The options of `load_model`."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
            "pooling": self.pooling,
        }

    @property
    def examples_per_batch(self) -> int:
        """The given batch size; default: large on a GPU, small on a CPU."""
        return self.batch_size or (512 if named_device(self.device).type == "cuda" else 32)

    def scored_per_batch(self, task: Task) -> int:
        """The given batch size; default: limited by tokens, because scoring does not retry with smaller batches."""
        most = SCORED_TOKENS // (self.max_length or task.max_length)
        return self.batch_size or max(1, min(self.examples_per_batch, most))


@dataclass(frozen=True)
class Loaded:
    """A loaded source.

    rows      rows of the data; None if it was given as batches, or is not read yet
    examples  a sample of them as batches
    sentence  the SentenceTransformer or CrossEncoder that contains the model
    reading   of an encoder-decoder's rows: the columns and the prefix, in words
    """

    model: PreTrainedModel
    tokenizer: Any
    task: Task
    rows: Rows | None = None
    examples: Any = None
    sentence: Any = None
    reading: str = ""

    @property
    def notes(self) -> list[str]:
        """Notes for the report about loading the model and reading its data."""
        ran = any(map(is_remote, (self.model, self.model.config, self.tokenizer)))
        return [*["custom code of the model was run (--trust-remote-code)"] * ran, *filter(None, [self.reading])]


def open_source(
    source: Source,
    evaluation: Any = None,
    *,
    methods: Sequence[Method] = (),
    scored: bool = True,
    watcher: Watcher = quiet,
) -> Loaded:
    """Load the model with its tokenizer and task.

    evaluation  rows to be scored on
    methods     methods that will prune the model: the examples that they need are drawn
    scored      whether the model will be scored, which needs the tokenizer even if the data is batches

    Options, the first row of every data file and, for pruning, the architecture are checked before anything large is
    loaded. Models in memory stay on their device.
    """
    checked_samples(source.samples)
    if source.task:
        find_task(source.task)
    for data in (source.data, evaluation):
        if isinstance(data, (str, os.PathLike)):
            read_rows(data, limit=1)
        elif isinstance(data, Mapping) and hasattr(data, "column_names"):
            raise DataError(f"The data is several data sets; give one of them: {', '.join(data)}.")
    if methods and source.named:
        check_prunable(source.name, trust_remote_code=source.trust_remote_code)
    watcher("load", 0, 1)
    given, sentence = source.model, None
    if source.named:
        model = load_model(source.name, **source.loading)
    elif is_sentence_model(given):
        model, sentence = transformer_of(given), given
    elif is_transformer(given):
        model = given
        embeds = model.base_model is model and not reads_targets(model)
        if embeds and (source.pooling or needs_reading(source.data)):
            attach_pooling(model, source.name, source.pooling)
    else:
        raise ModelError(
            f"A {type(given).__name__} is not a model that can be pruned; give a transformers model, a "
            "SentenceTransformer or CrossEncoder, a directory, or a Hub id."
        )
    reads = scored or source.data is None or needs_reading(source.data)
    tokenizer = reader_for(source, model, sentence) if reads else source.tokenizer
    watcher("load", 1, 1)
    loaded = Loaded(model, tokenizer, task_of(model, source.task), sentence=sentence)
    return draw(source, loaded, *methods, watcher=watcher) if methods else loaded


def reader_for(source: Source, model: PreTrainedModel, sentence: Any = None) -> Any:
    """The tokenizer or processor: the given one, that of the SentenceTransformer, or the model's own."""
    if isinstance(source.tokenizer, (str, os.PathLike)):
        raise InputError(
            f"tokenizer='{source.tokenizer}' is a name; pass the tokenizer itself: AutoTokenizer.from_pretrained(...)."
        )
    if source.tokenizer is not None:
        return source.tokenizer
    if sentence is not None:
        return sentence.tokenizer
    if not source.name:
        raise InputError(
            f"Texts need a tokenizer, and this {type(model).__name__} does not know where it came from "
            "(its name_or_path is empty). Give one: tokenizer=..."
        )
    try:
        return reader_of(source.name, model, source.images, trust_remote_code=source.trust_remote_code)
    except ModelError as error:
        if source.named:
            raise
        raise ModelError(f"{error} Give the tokenizer itself: tokenizer=...") from error


def rows_of(data: Any, task: Task, *, split: Any = "train") -> Rows:
    """Rows of a file, a data set, texts or pairs; default: the task's own data set."""
    if data is None:
        return load_task_rows(task, split)
    names = text_columns_of(data)
    if names is None:
        return as_rows(data)
    if any(not is_text(one) or isinstance(one, str) is (len(names) == 2) for one in data):
        raise DataError("The data mixes texts, pairs of texts and other things; give one kind.")
    return Rows({names[0]: data} if len(names) == 1 else dict(zip(names, zip(*data, strict=True), strict=True)))


def text_columns_of(data: Any) -> tuple[str, ...] | None:
    """Column names for a list of texts or of pairs; None for other data."""
    if isinstance(data, (list, tuple)) and data and is_text(data[0]):
        return ("text",) if isinstance(data[0], str) else ("text1", "text2")
    return None


def draw(source: Source, loaded: Loaded, *methods: Method, watcher: Watcher = quiet) -> Loaded:
    """Read the rows, if not done before, and draw examples by the seed.

    Data given as batches is sampled later by the pipeline. Labels are read only if a method uses them.
    """
    if source.data is not None and not needs_reading(source.data):
        return replace(loaded, examples=source.data)
    if source.data is None and loaded.task.hub is None:
        raise ModelError(
            f"No data: give --data FILE (the task '{loaded.task.name}' has no data set of its own on the Hub)."
        )
    with step(watcher, "read"):
        rows = rows_of(source.data, loaded.task) if loaded.rows is None else loaded.rows
    names = text_columns_of(source.data)
    wants = {"ignore"} if names else {method.wants_labels for method in methods}  # plain texts have no labels
    most = max(method.most_examples(loaded.model) for method in methods)
    labels: Labels = "require" if "require" in wants else "optional" if "prefer" in wants else "ignore"
    with step(watcher, "tokenise"):
        examples = encode(
            rows, loaded.tokenizer, loaded.task, model_config=loaded.model.config, max_length=source.max_length,
            batch_size=_side_by_side(loaded, source.examples_per_batch), samples=checked_samples(source.samples, most),
            seed=source.seed, labels=labels, text_columns=source.text_columns or names,
            label_column=source.label_column, prefix=source.prefix, pooling=pooling_of(loaded.model),
            model=loaded.model,
            bucket=False,  # keep the order, so that results equal those of the caller's own batches
        )  # fmt: skip
    pairs = loaded.task.kind == "seq2seq" and loaded.model.main_input_name == "input_ids" and not names
    reading = (
        reading_of(rows, loaded.model.config, source.text_columns, source.label_column, source.prefix) if pairs else ""
    )
    return replace(loaded, rows=rows, examples=examples, reading=reading)


def _side_by_side(loaded: Loaded, examples: int) -> int:
    """How many examples share a batch: one where a head that looks for padding has no token for it."""
    return examples if accepted_by(loaded.model).batches else 1


def exam_of(
    source: Source,
    loaded: Loaded,
    evaluation: Any,
    *,
    limit: int | None = None,
    dense: PreTrainedModel | None,
) -> Exam:
    """The exam for this model and its pruned copies; default data: the task's dev split.

    dense  the dense model, for agreement and as index
    """
    if evaluation is None and loaded.task.hub is None:
        raise DataError(
            f"Nothing to score on: give --eval FILE (the task '{loaded.task.name}' has no dev set of its own)."
        )
    index = None  # every model embeds the passages itself
    if source.index is not None:
        index = dense if source.index == "dense" else load_model(source.index, **source.loading)
    return make_exam(
        loaded.model, loaded.tokenizer, rows_of(evaluation, loaded.task, split="dev"), loaded.task,
        batch_size=_side_by_side(loaded, source.scored_per_batch(loaded.task)), max_length=source.max_length,
        text_columns=source.text_columns or text_columns_of(evaluation), label_column=source.label_column,
        limit=limit, metric=source.metric, index=index, prefix=source.prefix, teacher=dense,
    )  # fmt: skip


def data_name(source: Source) -> str:
    """The name of the data in settings and commands: the file, or the type such as `(list)`."""
    if source.data is None:
        return "Hub"
    return str(source.data) if isinstance(source.data, (str, os.PathLike)) else f"({type(source.data).__name__})"


def companions_of(source: Source, loaded: Loaded) -> Any:
    """The source of the tokenizer and other files of a pruned model: the dense model's directory, or the tokenizer.

    Files of a model on the Hub are downloaded.
    """
    named = folder_of(source) is not None or isinstance(source.model, str)
    return (found_locally(source.name, fetch=True) if named else None) or loaded.tokenizer


def folder_of(source: Source) -> Path | None:
    """The model's directory, if it has one."""
    path = Path(source.name) if source.name else None
    return path if path is not None and path.exists() else None
