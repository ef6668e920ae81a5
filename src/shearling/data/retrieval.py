"""Queries, passages and relevance judgements: from folders in BEIR's layout, or from rows of pairs.

A row is a judgement: a query, a passage and the relevance (1 without such a column). A row without a query is a
passage of the corpus that is relevant to no query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shearling.data.columns import find_label_column, find_text_columns, read_scores
from shearling.data.rows import Rows
from shearling.data.tasks import Task
from shearling.errors import DataError
from shearling.schema.rules import shown

_SUFFIXES = ("", ".gz", ".xz")
_SPLITS = ("test", "dev", "validation", "val", "train")  # of the judgements; the first one found is used


@dataclass(frozen=True)
class Judged:
    """A search task; duplicate texts are merged.

    relevant   per query, the grades of its relevant passages by index
    same       per query, the passage with the same text, unless it is relevant; else None
    """

    queries: list[str]
    passages: list[str]
    relevant: list[dict[int, float]]
    same: list[int | None]

    def rank(self, query: int, similarity: NDArray[Any], depth: int) -> NDArray[np.int64]:
        """Indices of the nearest passages, without the query itself, as in BEIR."""
        own = self.same[query]
        if own is not None:
            similarity = similarity.copy()
            similarity[own] = -np.inf
        top = np.argpartition(-similarity, min(depth, len(similarity) - 1))[:depth]
        return top[np.argsort(-similarity[top], kind="stable")]


def judged(
    rows: Rows, task: Task, text_columns: Sequence[str] | None = None, label_column: str | None = None
) -> Judged:
    """Rows as a search task; queries without a relevant passage are dropped."""
    queries, passages, grades = _columns(rows, task, text_columns, label_column)
    numbers = {text: number for number, text in enumerate(dict.fromkeys(passages))}
    relevant: dict[str, dict[int, float]] = {}
    for query, passage, grade in zip(queries, passages, grades, strict=True):
        if query is not None and grade > 0:
            found = relevant.setdefault(query, {})
            found[numbers[passage]] = max(grade, found.get(numbers[passage], 0.0))
    if not relevant:
        raise DataError(f"no row of {rows.source} names a relevant passage; task {task.name} needs some to look for")
    itself = [numbers.get(query) for query in relevant]
    same = [None if own in found else own for own, found in zip(itself, relevant.values(), strict=True)]
    return Judged(list(relevant), list(numbers), list(relevant.values()), same)


def candidates(
    rows: Rows, task: Task, text_columns: Sequence[str] | None = None, label_column: str | None = None
) -> Rows:
    """Rows as pairs for a reranker: those with a query, with columns query, passage and relevance."""
    queries, passages, grades = _columns(rows, task, text_columns, label_column)
    kept = [i for i, query in enumerate(queries) if query is not None]
    columns: dict[str, Sequence[Any]] = {"query": queries, "passage": passages, "relevance": grades}
    return Rows(columns, source=rows.source).select(kept)


def first_queries(rows: Rows, task: Task, limit: int | None, text_columns: Sequence[str] | None = None) -> Rows:
    """The rows of the first `limit` queries; all passages stay, so that the search does not become easier."""
    if limit is None:
        return rows
    if limit < 1:
        raise DataError(f"{limit} queries of {rows.source} were asked for; ask for at least 1")
    query, _ = find_text_columns(rows, task, text_columns)
    texts = rows.column(query)
    chosen = set([text for text in dict.fromkeys(texts) if text is not None][:limit])
    if task.kind == "rerank":
        return rows.select(i for i, text in enumerate(texts) if text in chosen)
    cut = [text if text in chosen else None for text in texts]
    columns = {name: rows.column(name) for name in rows.names} | {query: cut}
    return Rows(columns, source=rows.source)


def search_texts(rows: Rows, task: Task, text_columns: Sequence[str] | None = None) -> tuple[list[str], list[str]]:
    """All queries and all passages, without duplicates."""
    queries, passages, _ = _columns(rows, task, text_columns, None)
    return [text for text in dict.fromkeys(queries) if text is not None], list(dict.fromkeys(passages))


def is_search(folder: Path) -> bool:
    """Whether a folder is in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/*.tsv."""
    return _file(folder, "corpus.jsonl") is not None and _file(folder, "queries.jsonl") is not None


def read_search(folder: Path) -> Rows:
    """Read a folder in BEIR's layout: judgements, then passages without any."""
    from shearling.data.files import read_objects, read_rows

    files = [_file(folder, name) for name in ("corpus.jsonl", "queries.jsonl")]
    qrels = next((f for s in _SPLITS for d in ("qrels", ".") if (f := _file(folder / d, f"{s}.tsv"))), None)
    qrels = qrels or _file(folder, "qrels.tsv")
    if files[0] is None or files[1] is None or qrels is None:
        raise DataError(f"{folder} lacks one of corpus.jsonl, queries.jsonl and qrels/test.tsv; give all of them")
    corpus = {
        _id(entry, files[0]): f"{entry.get('title') or ''} {entry.get('text') or ''}".strip()  # joined as BEIR does
        for entry in read_objects(files[0])
    }
    queries = {_id(entry, files[1]): str(entry.get("text", "")) for entry in read_objects(files[1])}
    table = read_rows(qrels)
    if len(table.names) != 3:
        raise DataError(f"{qrels} has the columns {list(table.names)}; give query-id, corpus-id and score")
    records: list[tuple[str | None, str, Any]] = []
    for query, passage, grade in zip(*map(table.column, table.names), strict=True):
        if query not in queries or passage not in corpus:
            what = f"query {query!r}" if query not in queries else f"passage {passage!r}"
            raise DataError(f"{qrels} judges the {what}, which is not in {folder}")
        records.append((queries[query], corpus[passage], grade))
    seen = {passage for _, passage, _ in records}
    records += [(None, passage, 0) for passage in dict.fromkeys(corpus.values()) if passage not in seen]
    names = ("query", "passage", "relevance")
    return Rows(dict(zip(names, zip(*records, strict=True), strict=True)), source=str(folder))


def _id(entry: dict[str, Any], path: Path) -> str:
    if "_id" not in entry:
        raise DataError(f"a line of {path} has no _id; it has {sorted(entry)}")
    return str(entry["_id"])


def _file(folder: Path, name: str) -> Path | None:
    return next((folder / (name + suffix) for suffix in _SUFFIXES if (folder / (name + suffix)).is_file()), None)


def _columns(
    rows: Rows, task: Task, text_columns: Sequence[str] | None, label_column: str | None
) -> tuple[list[str | None], list[str], list[float]]:
    """Queries (None where a row has none), passages and grades."""
    query, passage = find_text_columns(rows, task, text_columns)
    label = find_label_column(rows, task, label_column)
    for name, empty in ((query, (str, type(None))), (passage, (str,))):
        for number, value in enumerate(rows.column(name), start=1):
            if not isinstance(value, empty):
                raise DataError(f"row {number} of column {name!r} of {rows.source} holds {shown(value)}; give a text")
    grades = [1.0] * len(rows) if label is None else read_scores(rows, label).tolist()
    return list(rows.column(query)), list(rows.column(passage)), grades
