"""The formats by name, and which of them suit a model."""

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

    write        writes the model to the job's path
    open_runner  opens what was written, to be run
    runtime      what runs it, with its version
    needed       packages to import
    extra        the extra of shearling that brings them; empty where torch is enough
    suffix       of the file; empty for a directory
    precisions   what it can be written in; the first is the default
    unsuited     why the model cannot be written; None where it can. torch tells itself where it cannot trace a model
    part         the part of the model that is written: all of it, or the encoder without its head
    """

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


ONNX = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "onnx": Format(
        onnx.write, onnx.open_runner, onnx.runtime, ONNX, "export", ".onnx",
        ("float32", "float16", "int8-dynamic", "int8-static"),
    ),
    "torch": Format(
        exported.write, exported.open_runner, exported.runtime, ("torch",), "", ".pt2", ("float32", "float16"),
    ),
    "openvino": Format(  # it has no ranges per batch
        openvino.write, openvino.open_runner, openvino.runtime, (*ONNX, "openvino"), "openvino", ".xml",
        ("float32", "float16", "int8-static"),
    ),
    "gguf": Format(
        gguf.write, gguf_run.open_runner, gguf_run.runtime, ("gguf",), "gguf", ".gguf", tuple(gguf.FILE_TYPES),
        gguf.unsuited,
    ),
    "ctranslate2": Format(
        ctranslate2.write, ctranslate2.open_runner, ctranslate2.runtime, ("ctranslate2",), "ctranslate2", "",
        tuple(ctranslate2.QUANTIZATION), ctranslate2.unsuited, lambda model: model.base_model,
    ),
}  # fmt: skip
ALIASES = {"exported": "torch"}  # the name of the first edition
INT8 = ("int8-dynamic", "int8-static", "q8_0")  # the best way to 8 bits first


def find_format(name: str) -> tuple[str, Format]:
    """The format and its name, once the packages it needs are there."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise InputError(f"No format '{name}'; there are {', '.join(FORMATS)}.")
    found = FORMATS[name]
    if found.missing:
        raise InputError(f"Export to {name} needs {', '.join(found.missing)}: pip install 'shearling[{found.extra}]'.")
    return name, found


def find_precision(name: str, kind: Format, asked: str | None) -> str:
    """The precision as the format calls it: `int8` is the format's best way to 8 bits, None its default."""
    if asked is None:
        return kind.precisions[0]
    known = {"f16": "float16", "f32": "float32"}.get(asked, asked)
    if known == "int8":
        known = next((p for p in INT8 if p in kind.precisions), known)
    if known not in kind.precisions:
        raise InputError(
            f"--format {name} is written as {', '.join(kind.precisions)}, not as {asked}"
            + ("; --int8 goes with --format onnx." if known == "int8" else ".")
        )
    return known


@dataclass(frozen=True)
class Suits:
    """Whether a format suits a model, and what is missing for it."""

    format: str
    reason: str | None  # why not
    missing: list[str]  # packages
    extra: str
    precisions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "format": self.format,
            "suits": self.reason is None,
            "reason": self.reason,
            "installed": not self.missing,
            "install": f"pip install 'shearling[{self.extra}]'" if self.missing else None,
            "precisions": list(self.precisions),
        }


def suitable(model: PreTrainedModel) -> list[Suits]:
    """Every format, and whether it suits this model."""
    return [Suits(n, k.unsuited(model), k.missing, k.extra, k.precisions) for n, k in FORMATS.items()]


def check_suits(name: str, kind: Format, model: PreTrainedModel) -> None:
    """Complain where the format cannot hold the model."""
    if (reason := kind.unsuited(model)) is not None:
        others = ", ".join(s.format for s in suitable(model) if s.reason is None)
        raise ModelError(f"The model cannot be written as {name}: {reason}. Formats that suit it: {others}.")


def describe_list(found: list[Suits]) -> str:
    """One line a format."""
    lines = []
    for row in found:
        said = "yes" if row.reason is None else "no"
        why = row.reason or f"as {', '.join(row.precisions)}"
        if row.reason is None and row.missing:
            why += f"; needs {', '.join(row.missing)}: pip install 'shearling[{row.extra}]'"
        lines.append(f"  {row.format:<12}{said:<5}{why}")
    return "\n".join(lines)
