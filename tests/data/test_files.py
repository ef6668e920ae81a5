import gzip
import json
import lzma
import sys

import pytest

from shearling.data import Rows, as_rows, load_task_rows, read_rows
from shearling.errors import DataError

RECORDS = [{"text": 'good, "film"', "label": 1}, {"text": "naïve\u2028line", "label": 0}, {"text": "", "label": 1}]


def jsonl(records=RECORDS):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("limit", [None, 2, 99])
def test_jsonl_plain_and_compressed(tmp_path, suffix, limit):
    path = tmp_path / f"rows.jsonl{suffix}"
    opener = {"": open, ".gz": gzip.open, ".xz": lzma.open}[suffix]
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n" + jsonl())  # blank lines do not count
    rows = read_rows(path, limit=limit)
    assert rows.names == ("text", "label")
    assert rows.column("text") == tuple(record["text"] for record in RECORDS[:limit])


def test_json_list_and_json_lines_in_json(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(RECORDS))
    (tmp_path / "lines.json").write_text(jsonl(), encoding="utf-8")
    assert read_rows(tmp_path / "list.json", limit=2).column("label") == (1, 0)
    assert read_rows(tmp_path / "lines.json").fingerprint() == read_rows(tmp_path / "list.json").fingerprint()


def test_csv_quotes_newlines_and_long_fields(tmp_path):
    long = "word " * 100_000
    path = tmp_path / "rows.csv"
    path.write_text(f'\ufefftext,label\n"one, ""two""\nthree",1\n{long},0\n', encoding="utf-8")
    rows = read_rows(path)
    assert rows.column("text") == ('one, "two"\nthree', long)
    assert rows.column("label") == ("1", "0")


def test_tsv_takes_quotes_as_they_are(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_bytes(b'sentence\tlabel\r\n"it \'s\t0\r\nfine "\t1\r\n')
    assert read_rows(path).column("sentence") == ("\"it 's", 'fine "')


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_parquet(tmp_path, limit):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "label": [0, 1, 0]}), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet", limit=limit).column("text") == ("a", "b", "c")[:limit]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install shearling\[data\]"):
        read_rows(tmp_path / "rows.parquet")


def test_text_by_paragraph_or_line(tmp_path):
    (tmp_path / "paragraphs.txt").write_text("one\nstill one\n\n  \ntwo\n")
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    assert read_rows(tmp_path / "paragraphs.txt").column("text") == ("one\nstill one", "two")
    assert read_rows(tmp_path / "lines.txt").column("text") == ("one", "two")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"", "no rows"),
        ("rows.jsonl", b"\n\n", "no rows"),
        ("rows.csv", b"text,label\n", "no rows"),
        ("rows.txt", b" \n", "no rows"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 .*is not JSON"),
        ("rows.jsonl", b'{"text": "a"}\n[1]\n', "line 2 .*not an object"),
        ("rows.jsonl", b'{"text": "a"}\n\n{"txt": "a"}\n', "line 3 .*columns"),
        ("rows.json", b'[{"text": "a"},\n]', "line 2 .*is not JSON"),
        ("rows.json", b'[{"text": "a"}, {}]', "element 2 "),
        ("rows.csv", b"text,label\na,1\nb\n", "line 3 .*1 cells.*header 2"),
        ("rows.csv", b'text,label\n"a,1\n', "not CSV"),
        ("rows.csv", b"text,text\na,b\n", "more than once"),
        ("rows.tsv", b"text\tlabel\na\tb\tc\n", "line 2 .*3 cells"),
        ("rows.jsonl", b'{"text": "caf\xe9"}\n', "not UTF-8"),
        ("rows.txt", "text".encode("utf-16"), "not UTF-8"),
        ("rows.jsonl.gz", gzip.compress(jsonl().encode(), mtime=0)[:-9], "truncated or damaged"),
        ("rows.jsonl.xz", lzma.compress(jsonl().encode())[:-9], "truncated or damaged"),
        ("rows.jsonl.gz", b"plain text", "truncated or damaged"),
        ("rows.parquet", b"not parquet", "parquet"),
        ("rows.docx", b"x", "suffix"),
        ("rows", b"x", "suffix"),
    ],
)
def test_bad_files_get_one_clear_message(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def test_missing_file_and_directory(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="there is no file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is a directory"):
        read_rows(tmp_path / "folder.jsonl")
    with pytest.raises(DataError, match="at least 1"):
        read_rows(tmp_path / "none.jsonl", limit=0)


def test_rows_are_a_table():
    rows = Rows.from_records(RECORDS)
    assert len(rows) == 3
    assert rows.select([2, 0, 0]).column("label") == (1, 1, 1)
    assert len(rows.head(2)) == 2
    assert rows.select([0]).fingerprint() != rows.fingerprint() == Rows.from_records(RECORDS).fingerprint()
    with pytest.raises(DataError, match=r"no column 'txt'.*\['text', 'label'\]"):
        rows.column("txt")
    with pytest.raises(DataError, match="different lengths"):
        Rows({"a": [1], "b": []})


def test_as_rows_takes_what_callers_hold(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(jsonl(), encoding="utf-8")
    for data in (path, str(path), RECORDS, Rows.from_records(RECORDS)):
        assert len(as_rows(data, limit=2)) == 2
    with pytest.raises(DataError, match="no rows"):
        as_rows([])
    with pytest.raises(DataError, match="is a int"):
        as_rows(3)


def test_as_rows_takes_a_dataset():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(RECORDS).with_format("torch")
    assert as_rows(dataset).column("label") == (1, 0, 1)
    with pytest.raises(DataError, match="DatasetDict with the splits"):
        as_rows(datasets.DatasetDict(train=dataset))


def test_hub_unreachable_says_what_to_do(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*_, **__):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="no route; check the network, or pass --data FILE"):
        load_task_rows("sst2")
    with pytest.raises(DataError, match="pass --data FILE"):
        load_task_rows("classification")


def test_hub_splits(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*names, split):
        asked.append((*names, split))
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(load_task_rows("mnli", "dev")) == len(RECORDS)
    load_task_rows("squad_v2", "train")
    assert asked == [("nyu-mll/glue", "mnli", "validation_matched"), ("rajpurkar/squad_v2", None, "train")]
