"""Searches from folders in BEIR's layout and from rows of pairs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shearling.data import Rows, find_task, read_rows
from shearling.data.retrieval import candidates, first_queries, judged, search_texts
from shearling.errors import DataError

RETRIEVAL = find_task("retrieval")
CORPUS = [
    {"_id": "d1", "title": "Paris", "text": "a city", "metadata": {}},
    {"_id": "d2", "title": "", "text": "a river"},
    {"_id": "d3", "text": "a film"},
]
QUERIES = [{"_id": "q1", "text": "where is paris"}, {"_id": "q2", "text": "who"}, {"_id": "q3", "text": "unjudged"}]


def beir(folder: Path, qrels: str = "q1\td1\t2\nq1\td2\t1\nq2\td2\t0\n", split: str = "test") -> Path:
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, CORPUS)) + "\n\n")
    with gzip.open(folder / "queries.jsonl.gz", "wt") as stream:
        stream.write("\n".join(map(json.dumps, QUERIES)))
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    return folder


def test_a_folder_in_the_layout_of_beir(tmp_path: Path) -> None:
    rows = read_rows(beir(tmp_path / "set"))
    search = judged(rows, RETRIEVAL)
    assert search.queries == ["where is paris"]  # the others have no relevant passage
    assert search.passages == ["Paris a city", "a river", "a film"]
    assert search.relevant == [{0: 2.0, 1: 1.0}]
    pairs = candidates(rows, find_task("rerank"))
    assert list(zip(*map(pairs.column, pairs.names), strict=True)) == [
        ("where is paris", "Paris a city", 2.0), ("where is paris", "a river", 1.0), ("who", "a river", 0.0),
    ]  # fmt: skip
    assert search_texts(rows, RETRIEVAL) == (["where is paris", "who"], ["Paris a city", "a river", "a film"])


def test_the_test_judgements_come_first(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set", split="train")
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq2\td3\t1\n")
    assert judged(read_rows(folder), RETRIEVAL).queries == ["who"]


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("q9\td1\t1\n", "judges the query 'q9', which is not in"),
        ("q1\td9\t1\n", "judges the passage 'd9', which is not in"),
        ("q1\td1\t0\n", "no row of .* names a relevant passage"),
        ("q1\td1\tmuch\n", "a label must be a number"),
    ],
)
def test_judgements_that_make_no_sense(qrels: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        judged(read_rows(beir(tmp_path / "set", qrels)), RETRIEVAL)


def test_a_folder_without_judgements(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set")
    (folder / "qrels" / "test.tsv").unlink()
    with pytest.raises(DataError, match=r"lacks one of corpus.jsonl, queries.jsonl and qrels/test.tsv"):
        read_rows(folder)


def test_pairs_are_all_relevant_and_texts_count_once() -> None:
    rows = Rows({"question": ["q", "r", "q"], "context": ["one", "one", "two"]})
    search = judged(rows, RETRIEVAL)
    assert (search.queries, search.passages) == (["q", "r"], ["one", "two"])
    assert search.relevant == [{0: 1.0, 1: 1.0}, {0: 1.0}]


def test_a_limit_cuts_queries_and_keeps_passages() -> None:
    rows = Rows({"query": ["q", "r", "q"], "passage": ["one", "two", "three"]})
    search = judged(first_queries(rows, RETRIEVAL, 1), RETRIEVAL)
    assert (search.queries, search.passages) == (["q"], ["one", "two", "three"])
    assert len(first_queries(rows, find_task("rerank"), 1)) == 2
    with pytest.raises(DataError, match="at least 1"):
        first_queries(rows, RETRIEVAL, 0)


def test_a_query_does_not_find_itself() -> None:
    rows = Rows({"query": ["a", "b"], "passage": ["b", "a"], "label": [1, 1]})
    search = judged(rows, RETRIEVAL)
    near: Any = np.array([0.5, 0.9])  # of the passages b and a
    assert search.rank(0, near, 2).tolist()[0] == 0  # a is the query itself
    assert judged(Rows({"query": ["a"], "passage": ["a"]}), RETRIEVAL).same == [None]  # unless it is the answer


def test_ranks_are_the_nearest_in_order() -> None:
    rows = Rows({"query": ["q"] * 40, "passage": [str(i) for i in range(40)]})
    near = np.random.default_rng(0).random(40)
    assert judged(rows, RETRIEVAL).rank(0, near, 10).tolist() == np.argsort(-near)[:10].tolist()


def test_texts_that_are_none() -> None:
    with pytest.raises(DataError, match="row 1 of column 'passage'"):
        judged(Rows({"query": ["a"], "passage": [None]}), RETRIEVAL)
