"""The table of export formats."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.errors import InputError, ModelError
from shearling.exporters import ctranslate2, exported, gguf, gguf_run, onnx, openvino
from shearling.exporters.check import Runner
from shearling.exporters.formats import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Format:
    """One format.

    name         value of `--format`
    write        writes the model to the job's path
    open_runner  opens the written file for running
    runtime      name and version of the runtime
    needed       required packages
    extra        shearling's extra with these packages; empty if torch is enough
    suffix       of the file; empty for a directory
    precisions   supported precisions; the first is the default
    unsuited     why the model cannot be written, or None; tracing errors are reported by torch
    part         the part of the model that is written: all of it, or the encoder without its head
    """

    name: str
    write: Callable[[Job], None]
    open_runner: Callable[[Path], Runner]
    runtime: Callable[[], str]
    needed: tuple[str, ...]
    extra: str
    suffix: str
    precisions: tuple[str, ...]
    unsuited: Callable[[PreTrainedModel], str | None] = lambda model: None
    part: Callable[[PreTrainedModel], PreTrainedModel] = lambda model: model

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.needed if importlib.util.find_spec(name) is None]

    def precision(self, asked: str | None) -> str:
        """The format's name of a precision: `int8` is its best 8-bit one, None its default."""
        if asked is None:
            return self.precisions[0]
        known = {"f16": "float16", "f32": "float32"}.get(asked, asked)
        if known == "int8":
            known = next((p for p in INT8 if p in self.precisions), known)
        if known not in self.precisions:
            raise InputError(
                f"--format {self.name} is written as {', '.join(self.precisions)}, not as {asked}"
                + ("; --int8 goes with --format onnx." if known == "int8" else ".")
            )
        return known


ONNX = ("onnx", "onnxscript", "onnxruntime")
_FORMATS = (
    Format(
        "onnx", onnx.write, onnx.open_runner, onnx.runtime, ONNX, "export", ".onnx",
        ("float32", "float16", "int8-dynamic", "int8-static"),
    ),
    Format(
        "torch", exported.write, exported.open_runner, exported.runtime, ("torch",), "", ".pt2",
        ("float32", "float16"),
    ),
    Format(  # no dynamic quantisation
        "openvino", openvino.write, openvino.open_runner, openvino.runtime, (*ONNX, "openvino"), "openvino", ".xml",
        ("float32", "float16", "int8-static"),
    ),
    Format(
        "gguf", gguf.write, gguf_run.open_runner, gguf_run.runtime, ("gguf",), "gguf", ".gguf",
        tuple(gguf.FILE_TYPES), gguf.unsuited,
    ),
    Format(
        "ctranslate2", ctranslate2.write, ctranslate2.open_runner, ctranslate2.runtime, ("ctranslate2",),
        "ctranslate2", "", tuple(ctranslate2.QUANTIZATION), ctranslate2.unsuited, lambda model: model.base_model,
    ),
)  # fmt: skip
FORMATS = {kind.name: kind for kind in _FORMATS}
ALIASES = {"exported": "torch"}  # the name of the first edition
INT8 = ("int8-dynamic", "int8-static", "q8_0")  # in order of preference


def find_format(name: str) -> Format:
    """Look a format up by name, and check that its packages are installed."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise InputError(f"No format '{name}'; there are {', '.join(FORMATS)}.")
    found = FORMATS[name]
    if found.missing:
        raise InputError(f"Export to {name} needs {', '.join(found.missing)}: pip install 'shearling[{found.extra}]'.")
    return found


def suitable(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Every format and whether it suits this model, as in `export --format list --json`."""
    found = []
    for kind in FORMATS.values():
        reason, missing = kind.unsuited(model), kind.missing
        found.append({
            "format": kind.name,
            "suits": reason is None,
            "reason": reason,
            "installed": not missing,
            "install": f"pip install 'shearling[{kind.extra}]'" if missing else None,
            "precisions": list(kind.precisions),
        })  # fmt: skip
    return found


def check_suits(kind: Format, model: PreTrainedModel) -> None:
    """Raise if the format does not support the model."""
    if (reason := kind.unsuited(model)) is not None:
        others = ", ".join(row["format"] for row in suitable(model) if row["suits"])
        raise ModelError(f"The model cannot be written as {kind.name}: {reason}. Formats that suit it: {others}.")


def describe_list(found: list[dict[str, Any]]) -> str:
    """The result of `suitable` as text."""
    lines = []
    for row in found:
        why = row["reason"] or f"as {', '.join(row['precisions'])}"
        if row["suits"] and not row["installed"]:
            why += f"; needs {', '.join(FORMATS[row['format']].missing)}: {row['install']}"
        lines.append(f"  {row['format']:<12}{'yes' if row['suits'] else 'no':<5}{why}")
    return "\n".join(lines)
