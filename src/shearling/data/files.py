"""Read examples from local files: jsonl, json, csv, tsv, parquet and plain text, each also as .gz or .xz."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any

from shearling.data.rows import Rows, columns_of
from shearling.errors import DataError


def read_rows(path: str | PathLike[str], limit: int | None = None) -> Rows:
    """Read the first `limit` rows (default: all) of a file, by its suffix, or of a folder of images or audio files."""
    path = Path(path).expanduser()
    if limit is not None and limit < 1:
        raise DataError(f"{limit} rows of {path} were asked for; ask for at least 1")
    if path.is_dir():
        return _read_folder(path, limit)
    reader = _reader_for(path)
    if not path.exists():
        raise DataError(f"there is no file {path}; give the path of a {_FORMATS} file")
    with _damage_reported(path), _open(path) as stream:
        rows = Rows(reader(stream, path, limit), source=str(path))
    if len(rows) == 0:
        raise DataError(f"{path} has no rows; give a file with at least one example")
    return rows


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file, which may have different keys."""
    with _damage_reported(path), _open(path) as stream:
        for place, entry in _objects(stream, path):
            if not isinstance(entry, dict):
                raise DataError(f"{place} is a JSON {type(entry).__name__}; give one object per line")
            if entry:
                yield entry


def _read_folder(path: Path, limit: int | None) -> Rows:
    # Imported here because they import this module.
    from shearling.data.media import read_folder
    from shearling.data.retrieval import is_search, read_search

    if is_search(path):
        return read_search(path).head(limit)
    try:
        return read_folder(path, limit)
    except DataError as error:
        raise DataError(
            f"{path} is a directory; give one {_FORMATS} file in it, or images or sounds: {error}"
        ) from None


def _reader_for(path: Path) -> Callable[[IO[bytes], Path, int | None], Columns]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _ARCHIVES:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in _READERS:
        raise DataError(f"{path} has no known suffix; name it {_FORMATS} (also with .gz or .xz)")
    return _READERS[suffixes[-1]]


def _open(path: Path) -> IO[bytes]:
    opened: IO[bytes] = _ARCHIVES.get(path.suffix.lower(), open)(path, "rb")
    return opened


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Turn errors of decompressors, decoders and the operating system into DataError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start} of a block); save it as UTF-8") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged ({error}); fetch or compress it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except DataError:
        raise
    except (RecursionError, ValueError) as error:  # JSON nested too deeply, numbers with too many digits
        raise DataError(f"{path} holds JSON that cannot be read ({error}); give plain values") from error


Columns = dict[str, list[Any]]


def _text_lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines with their line ends, without a byte-order mark."""
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        yield from text


def _objects(stream: IO[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    """(location, value) of every non-empty line."""
    for number, line in enumerate(_text_lines(stream), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"line {number} of {path} is not JSON ({error.msg} at character {error.pos + 1}); "
                "give one JSON object per line"
            ) from error
        yield f"line {number} of {path}", record


def _read_jsonl(stream: IO[bytes], path: Path, limit: int | None) -> Columns:
    return columns_of(itertools.islice(_objects(stream, path), limit))


def _read_json(stream: IO[bytes], path: Path, limit: int | None) -> Columns:
    """A list of objects; also accepts one object per line."""
    text = stream.read().decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        return _read_jsonl(io.BytesIO(text.encode()), path, limit)
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"line {error.lineno} of {path} is not JSON ({error.msg}); give a list of objects") from error
    return columns_of((f"element {n} of {path}", record) for n, record in enumerate(records[:limit], start=1))


def _read_csv(stream: IO[bytes], path: Path, limit: int | None) -> Columns:
    with _long_fields():
        reader = csv.reader(_text_lines(stream), strict=True)
        try:
            return _table(((reader.line_num, cells) for cells in reader), path, limit)
        except csv.Error as error:
            raise DataError(f"line {reader.line_num} of {path} is not CSV ({error}); check its quotes") from error


def _read_tsv(stream: IO[bytes], path: Path, limit: int | None) -> Columns:
    """Quotes are ordinary characters, as in the files of GLUE."""
    lines = (line.rstrip("\r\n") for line in _text_lines(stream))
    return _table(((number, line.split("\t")) for number, line in enumerate(lines, start=1) if line), path, limit)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the csv module's limit of 131,072 characters per field."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _table(numbered: Iterator[tuple[int, list[str]]], path: Path, limit: int | None) -> Columns:
    """A header, and rows with the same number of cells."""
    _, header = next(numbered, (0, []))
    if len(set(header)) < len(header):
        twice = sorted({name for name in header if header.count(name) > 1})
        raise DataError(f"the header of {path} names {twice} more than once; give every column its own name")
    columns: Columns = {name: [] for name in header}
    filled = ((number, cells) for number, cells in numbered if cells)
    for number, cells in itertools.islice(filled, limit):
        if len(cells) != len(header):
            raise DataError(
                f"line {number} of {path} has {len(cells)} cells, its header {len(header)} ({', '.join(header)}); "
                "check the separators and quotes"
            )
        for name, cell in zip(header, cells, strict=True):
            columns[name].append(cell)
    return columns


def _read_parquet(stream: IO[bytes], path: Path, limit: int | None) -> Columns:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow; run: pip install shearling[data]") from error
    try:
        table = pyarrow.parquet.ParquetFile(stream)
        columns: Columns = {name: [] for name in table.schema_arrow.names}
        wanted = table.metadata.num_rows if limit is None else limit
        for batch in table.iter_batches():
            missing = wanted - (len(columns[batch.schema.names[0]]) if columns else 0)
            if missing <= 0:
                break
            for name, values in batch.slice(0, missing).to_pydict().items():
                columns[name].extend(values)
        return columns
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); write it again") from error


def _read_text(stream: IO[bytes], path: Path, limit: int | None) -> Columns:
    """One row per paragraph, or per line in a file without blank lines."""
    text = stream.read().decode("utf-8-sig").strip()
    paragraphs = re.split(r"\n\s*\n", text)
    if len(paragraphs) == 1:
        paragraphs = text.splitlines()
    return {"text": [part.strip() for part in paragraphs if part.strip()][:limit]}


_ARCHIVES: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_READERS: dict[str, Callable[[IO[bytes], Path, int | None], Columns]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
_FORMATS = ".jsonl, .json, .csv, .tsv, .parquet or .txt"
