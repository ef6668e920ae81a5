"""The formats by name, and which of them suit a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shearling.errors import InputError, ModelError
from shearling.export import ctranslate2, exported, gguf, onnx, openvino
from shearling.export.formats import Format, missing, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMATS: dict[str, Format] = {
    "onnx": onnx,
    "torch": exported,
    "openvino": openvino,
    "gguf": gguf,
    "ctranslate2": ctranslate2,
}
ALIASES = {"exported": "torch"}  # the name of the first edition
INT8 = ("int8-static", "int8-dynamic", "q8_0")


def find_format(name: str) -> tuple[str, Format]:
    """The format and its name, once the packages it needs are there."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise InputError(f"No format '{name}'; there are {', '.join(FORMATS)}.")
    require(name, FORMATS[name])
    return name, FORMATS[name]


def find_precision(name: str, kind: Format, asked: str | None) -> str:
    """The precision as the format calls it: `int8` is the format's best way to 8 bits, None its default."""
    if asked is None:
        return kind.PRECISIONS[0]
    known = {"f16": "float16", "f32": "float32"}.get(asked, asked)
    if known == "int8":
        known = next((p for p in (DEFAULT_INT8, *INT8) if p in kind.PRECISIONS), known)
    if known not in kind.PRECISIONS:
        raise InputError(
            f"--format {name} is written as {', '.join(kind.PRECISIONS)}, not as {asked}"
            + ("; --int8 goes with --format onnx." if known == "int8" else ".")
        )
    return known


DEFAULT_INT8 = "int8-dynamic"


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
    return [Suits(n, k.unsuited(model), missing(k), k.EXTRA, k.PRECISIONS) for n, k in FORMATS.items()]


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
