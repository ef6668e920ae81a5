"""From predictions to the score of a task, one function per kind of task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from shearling.data.batches import Batches, Tensors, Tokenized
from shearling.data.columns import read_scores, require_label_column
from shearling.data.encoder import Encoder
from shearling.data.lm import fills_blanks
from shearling.data.retrieval import Judged, candidates, judged
from shearling.data.rows import Rows
from shearling.data.squad import decode, read_answers
from shearling.data.tasks import Kind, Task, check_scored
from shearling.engine.decoder import start_of
from shearling.engine.losses import token_losses
from shearling.errors import DataError
from shearling.evaluation import metrics
from shearling.sample.batch import IGNORED

# Extracts predictions from the outputs of a batch, one row per example.
OutputReader = Callable[[Any, Tensors], torch.Tensor]


@dataclass(frozen=True)
class Writer:
    """Instead of a reader: generate up to `longest` tokens with an encoder-decoder, [examples, tokens, 1].

    start  options that choose the first tokens, such as a language
    """

    longest: int
    start: Mapping[str, int]


# Runs the model on batches and returns predictions in the order of the data; default reader: `output_reader`.
Predict = Callable[[Batches, OutputReader | Writer | None], torch.Tensor]

_NEIGHBOURS = 20  # of the kNN classifier
_TEMPERATURE = 0.07  # votes are exp(cosine / temperature), as in DINO's evaluation
_LM_TOKENS = 4096  # per batch, since logits over the vocabulary are large
_QUERIES = 256  # compared with all passages at a time


@dataclass(frozen=True)
class Predictions:
    """A model's prediction for every row, as text.

    right    the labels; empty without labels, like `correct`
    correct  whether the prediction is right
    """

    made: Sequence[str]
    right: Sequence[str] = ()
    correct: Sequence[bool] = ()


@dataclass(frozen=True)
class Evaluation:
    """A model's score on a task: `value` is in points from 0 to 100, except for perplexity.

    extra   other metrics, by name
    dense   score of the dense model, if known
    rows    fingerprint of the rows
    predictions  for classes, tags and answers only
    """

    task: str
    metric: str
    value: float
    examples: int
    em: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    dense: float | None = None
    rows: str | None = None
    predictions: Predictions | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        also = "" if self.em is None else f", exact match {self.em:.2f}"
        also += "" if self.dense is None else f" (dense {self.dense:.2f})"
        return f"{self.task}: {self.metric} {self.value:.2f}{also} on {self.examples:,} examples ({self.seconds:.1f} s)"

    def to_json(self) -> dict[str, Any]:
        """The fields of `shearling evaluate --json`, without unknown ones."""
        told = asdict(replace(self, predictions=None))
        known = {name: value for name, value in told.items() if name != "seconds" and value not in (None, {})}
        extra = {"extra": {name: round(value, 4) for name, value in self.extra.items()}} if self.extra else {}
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in known.items()} | extra


@dataclass(frozen=True)
class Questions:
    """Rows to score models on, and their encoder; tokenised rows are cached for the next model.

    index  retrieval and knn: embeddings [passages, D], unless the scored model computes them
    said   encoder-decoders: the dense model's next tokens [examples, tokens], for agreement
    """

    encoder: Encoder
    rows: Rows
    batch_size: int = 64
    index: torch.Tensor | None = None
    said: torch.Tensor | None = None

    @property
    def task(self) -> Task:
        """The task, with its metric."""
        return self.encoder.task

    @cached_property
    def examples(self) -> Tokenized:
        """The rows as model inputs with labels."""
        return self.encoder.tokenize(self.rows)

    @cached_property
    def search(self) -> Judged:
        """The rows as a search task."""
        return judged(self.rows, self.task, self.encoder.text_columns, self.encoder.label_column)

    def result(self, value: float, **more: Any) -> Evaluation:
        """An Evaluation of these rows by the task's metric; `more` overrides its fields."""
        return replace(Evaluation(self.task.name, self.task.metric, value, len(self.rows)), **more)

    def batches(self, examples: Tokenized | None = None) -> Batches:
        """Padded batches of the given examples; default: all."""
        return self.encoder.batches(self.examples if examples is None else examples, self.batch_size)

    def text_batches(self) -> Batches:
        """Smaller batches of all examples, for logits over a vocabulary."""
        most = max(1, _LM_TOKENS // self.encoder.max_length)
        return self.encoder.batches(self.examples, min(self.batch_size, most))

    def embed_index(self, run: Predict) -> torch.Tensor:
        """[passages, D]: embeddings of all passages (retrieval) or rows (knn)."""
        if self.task.kind == "knn":
            return run(self.batches(), None)
        return run(self.batches(self.encoder.embed(self.search.passages, "document")), None)


def score(asked: Questions, run: Predict) -> Evaluation:
    """Run the model on the rows and score its predictions."""
    check_scored(asked.encoder.model)
    return _SCORERS[asked.task.kind](asked, run)


def _score_search(asked: Questions, run: Predict) -> Evaluation:
    """Rank all passages for every query, and average each metric over the queries."""
    search = asked.search
    queries = run(asked.batches(asked.encoder.embed(search.queries, "query")), None)
    passages = asked.embed_index(run) if asked.index is None else asked.index
    _check_index(queries, passages)
    ranked: list[NDArray[np.int64]] = []
    for start in range(0, len(queries), _QUERIES):
        part = _similarity(queries[start : start + _QUERIES], passages, asked.encoder.pooling.similarity).numpy()
        ranked += [search.rank(start + i, row, metrics.DEPTH) for i, row in enumerate(part)]
    return _main(asked, _search_metrics(search, ranked), len(search.queries))


def _check_index(queries: torch.Tensor, index: torch.Tensor) -> None:
    if queries.shape[-1] != index.shape[-1]:
        raise DataError(
            f"the queries are embedded in {queries.shape[-1]} dimensions, the index in {index.shape[-1]}; take the "
            "index of the model that this one was pruned from"
        )


def _similarity(queries: torch.Tensor, passages: torch.Tensor, name: str) -> torch.Tensor:
    """[queries, passages]; higher is nearer."""
    if name in ("euclidean", "manhattan"):
        return -torch.cdist(queries, passages, p=2.0 if name == "euclidean" else 1.0)
    if name != "dot":
        queries, passages = F.normalize(queries, dim=-1), F.normalize(passages, dim=-1)
    return queries @ passages.T


def _search_metrics(search: Judged, ranked: list[NDArray[np.int64]]) -> dict[str, float]:
    scores: dict[str, list[float]] = {"ndcg@10": [], "mrr@10": [], "r@1": [], "r@10": []}
    for found, relevant in zip(ranked, search.relevant, strict=True):
        gains = [relevant.get(int(passage), 0.0) for passage in found]
        scores["ndcg@10"].append(metrics.ndcg(gains, list(relevant.values()), 10))
        scores["mrr@10"].append(metrics.reciprocal_rank(gains, 10))
        scores["r@1"].append(metrics.recall(gains, len(relevant), 1))
        scores["r@10"].append(metrics.recall(gains, len(relevant), 10))
    return {name: float(np.mean(values)) for name, values in scores.items()}


def _score_rerank(asked: Questions, run: Predict) -> Evaluation:
    """Rank the candidates of every query by the model's score."""
    pairs = candidates(asked.rows, asked.task, asked.encoder.text_columns, asked.encoder.label_column)
    guess = run(asked.batches(), None)[:, 0].numpy()
    gold = np.array(pairs.column("relevance"))
    if not (gold > 0).any() or (gold > 0).all():
        raise DataError(
            f"all candidates of {asked.rows.source} are equally relevant; task rerank needs some that are not"
        )
    groups: dict[str, list[int]] = {}
    for number, query in enumerate(pairs.column("query")):
        groups.setdefault(query, []).append(number)
    scores: dict[str, list[float]] = {"ndcg@10": [], "mrr@10": []}
    for members in groups.values():
        gains = gold[members]
        if (gains > 0).any():
            ordered = gains[np.argsort(-guess[members], kind="stable")].tolist()
            scores["ndcg@10"].append(metrics.ndcg(ordered, ordered, 10))
            scores["mrr@10"].append(metrics.reciprocal_rank(ordered, 10))
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    return _main(asked, means | {"auc": metrics.auc(gold > 0, guess)}, len(groups))


def _score_classes(asked: Questions, run: Predict) -> Evaluation:
    gold = asked.examples.values["labels"]
    guess = run(asked.batches(), None).argmax(dim=-1).numpy()
    scores = {"accuracy": metrics.accuracy(gold, guess)}
    if asked.encoder.config.num_labels == 2:
        scores |= {"f1": metrics.binary_f1(gold, guess), "matthews": metrics.matthews(gold, guess)}
    names = asked.encoder.config.id2label
    made, right = ([str(names[int(number)]) for number in numbers] for numbers in (guess, gold))
    said = Predictions(made, right, (guess == gold).tolist())
    return replace(_main(asked, scores, len(asked.rows)), predictions=said)


def _score_regression(asked: Questions, run: Predict) -> Evaluation:
    guess = run(asked.batches(), None)[:, 0].numpy()
    return _correlation(asked, asked.examples.values["labels"], guess)


def _score_embeddings(asked: Questions, run: Predict) -> Evaluation:
    rows, task = asked.rows, asked.task
    if len(asked.examples) != 2 * len(rows):
        raise DataError(f"task {task.name} scores pairs, but {rows.source} has one text column; name two")
    gold = read_scores(rows, require_label_column(rows, task, asked.encoder.label_column))
    first, second = run(asked.batches(), None).chunk(2)
    return _correlation(asked, gold, F.cosine_similarity(first, second).numpy())


def _correlation(asked: Questions, gold: Any, guess: Any) -> Evaluation:
    scores = {"spearman": metrics.spearman(gold, guess), "pearson": metrics.pearson(gold, guess)}
    return _main(asked, scores, len(gold))


def _main(asked: Questions, scores: dict[str, float], examples: int) -> Evaluation:
    points = {name: 100 * value for name, value in scores.items()}
    return asked.result(points.pop(asked.task.metric), examples=examples, extra=points)


def _score_tags(asked: Questions, run: Predict) -> Evaluation:
    """Entity F1, or accuracy per word if the tags are not entities (parts of speech)."""
    guess = run(asked.batches(), _best_class)[..., 0].numpy()
    names = {int(index): str(name) for index, name in asked.encoder.config.id2label.items()}
    gold_tags: list[list[str]] = []
    guessed_tags: list[list[str]] = []
    for gold, guessed in zip(asked.examples.tokens["labels"], guess, strict=True):
        words = [
            (names[label], names[int(best)]) for label, best in zip(gold, guessed, strict=False) if label != IGNORED
        ]
        gold_tags.append([word[0] for word in words])
        guessed_tags.append([word[1] for word in words])
    made, wanted = ([" ".join(tags) for tags in rows] for rows in (guessed_tags, gold_tags))
    said = Predictions(made, wanted, [a == b for a, b in zip(made, wanted, strict=True)])
    right = 100 * metrics.accuracy(np.concatenate(gold_tags), np.concatenate(guessed_tags))
    if not any(name.startswith(("B-", "I-", "S-", "U-")) for name in names.values()):
        return asked.result(right, metric="accuracy", predictions=said)
    precision, recall, f1 = (100 * value for value in metrics.entity_f1(gold_tags, guessed_tags))
    return asked.result(f1, extra={"precision": precision, "recall": recall, "accuracy": right}, predictions=said)


def _best_class(outputs: Any, batch: Tensors) -> torch.Tensor:
    logits = outputs["logits"]
    best = logits.argmax(dim=-1).float()  # [examples, tokens]
    return torch.where(logits.isfinite().all(dim=-1), best, torch.nan)[..., None]


def _score_answers(asked: Questions, run: Predict) -> Evaluation:
    encoder, rows = asked.encoder, asked.rows
    gold = read_answers(rows, require_label_column(rows, encoder.task, encoder.label_column))
    unanswerable = np.array([not answers for answers in gold])
    if encoder.task.name == "squad" and unanswerable.any():
        raise DataError(
            f"task squad has an answer to every question, {rows.source} has {unanswerable.sum()} without; use squad_v2"
        )
    contexts, windows = encoder.windows(rows)
    logits = run(asked.batches(windows.inputs), None)
    null = encoder.task.name == "squad_v2" or bool(unanswerable.any())
    answers = decode(logits, windows, contexts, may_be_null=null)
    right = [[answer.text for answer in some] for some in gold]
    em, f1 = metrics.squad_em_f1(answers, right)
    said = Predictions(answers, [some[0] if some else "" for some in right], (em == 1).tolist())
    extra = {}
    if unanswerable.any() and not unanswerable.all():
        parts = {"answerable_f1": f1[~unanswerable], "unanswerable_f1": f1[unanswerable]}
        extra = {name: 100 * float(part.mean()) for name, part in parts.items()}
    return asked.result(100 * float(f1.mean()), em=100 * float(em.mean()), extra=extra, predictions=said)


def _score_text(asked: Questions, run: Predict) -> Evaluation:
    causal = not fills_blanks(asked.encoder.tokenizer, asked.encoder.config)

    def read(outputs: Any, batch: Tensors) -> torch.Tensor:
        return _losses(outputs["logits"], batch["labels"], causal=causal)

    loss, tokens = run(asked.text_batches(), read).double().sum(dim=0).tolist()
    return asked.result(metrics.perplexity(loss, tokens), extra={"loss": loss / tokens, "tokens": tokens})


def _losses(logits: torch.Tensor, labels: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """[examples, 2]: summed cross-entropy and number of predicted tokens."""
    if causal:  # position t predicts token t + 1
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.stack([token_losses(logits, labels).sum(1), (labels != IGNORED).sum(dim=1)], dim=1)


def next_tokens(asked: Questions, run: Predict) -> torch.Tensor:
    """[examples, tokens, 2]: loss of every target token, and the model's most likely token there."""

    def read(outputs: Any, batch: Tensors) -> torch.Tensor:
        logits = outputs["logits"]
        return torch.stack([token_losses(logits, batch["labels"]), logits.argmax(-1).float()], dim=-1)

    return run(asked.text_batches(), read)


def _score_targets(asked: Questions, run: Predict) -> Evaluation:
    """Perplexity of the targets, agreement with the dense model's next tokens, and ROUGE-L if requested."""
    found = next_tokens(asked, run)
    lengths = torch.tensor([len(ids) for ids in asked.examples.tokens["labels"]])
    real = torch.arange(found.shape[1]) < lengths[:, None]  # [examples, tokens]
    loss, tokens = float(found[..., 0][real].double().sum()), int(real.sum())
    scores = {"perplexity": metrics.perplexity(loss, tokens), "loss": loss / tokens, "tokens": float(tokens)}
    if asked.said is not None:
        scores["agreement"] = 100 * float((found[..., 1] == asked.said)[real].double().mean())
    elif asked.task.metric == "agreement":
        raise DataError(
            "agreement is measured against the dense model, which is not known; score a checkpoint whose record names "
            "it, or use `prune --eval`, `sweep` or `compare`"
        )
    if asked.task.metric == "rouge-l":
        scores["rouge-l"] = 100 * _rouge(asked, run)
    return asked.result(scores.pop(asked.task.metric), extra=scores)


def _rouge(asked: Questions, run: Predict) -> float:
    """Mean ROUGE-L of greedily generated texts against the targets, both decoded by the tokenizer."""
    tokenizer, wanted = asked.encoder.tokenizer, asked.examples.tokens["labels"]
    written = run(asked.batches(), Writer(max(map(len, wanted)), start_of(asked.encoder.model)))[..., 0].long()
    texts = tokenizer.batch_decode(written.tolist(), skip_special_tokens=True)
    gold = tokenizer.batch_decode(list(wanted), skip_special_tokens=True)
    return float(np.mean([metrics.rouge_l(*pair) for pair in zip(gold, texts, strict=True)]))


def _score_neighbours(asked: Questions, run: Predict) -> Evaluation:
    """kNN classification of each row by the other rows."""
    rows = asked.rows
    labels = rows.column(require_label_column(rows, asked.task, asked.encoder.label_column))
    names, gold = np.unique([str(label) for label in labels], return_inverse=True)
    if len(rows) <= len(names):
        raise DataError(f"every row of {rows.source} is of a class of its own; task knn needs several of a class")
    guess = neighbours(run(asked.batches(), None), asked.index, torch.from_numpy(gold), len(names))
    return asked.result(100 * metrics.accuracy(gold, guess.numpy()))


def neighbours(queries: torch.Tensor, index: torch.Tensor | None, classes: torch.Tensor, count: int) -> torch.Tensor:
    """[n]: the class that the nearest rows of the index vote for; a row does not vote for itself."""
    bank = F.normalize(queries if index is None else index, dim=-1)
    _check_index(queries, bank)
    guess = []
    for start in range(0, len(queries), _QUERIES):
        part = F.normalize(queries[start : start + _QUERIES], dim=-1) @ bank.T
        part[torch.arange(len(part)), start + torch.arange(len(part))] = -torch.inf
        near, at = part.topk(min(_NEIGHBOURS, len(bank) - 1))
        votes = torch.zeros(len(part), count).scatter_add_(1, classes[at], (near / _TEMPERATURE).exp())
        guess.append(votes.argmax(1))
    return torch.cat(guess)


_SCORERS: dict[Kind, Callable[[Questions, Predict], Evaluation]] = {
    "classification": _score_classes,
    "regression": _score_regression,
    "token-classification": _score_tags,
    "question-answering": _score_answers,
    "embedding": _score_embeddings,
    "retrieval": _score_search,
    "rerank": _score_rerank,
    "lm": _score_text,
    "seq2seq": _score_targets,
    "knn": _score_neighbours,
}
