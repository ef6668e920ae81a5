"""Images and audio: folders or columns become batches through the model's processor."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shearling.data.batches import Batches, Tensors, Tokenized, cut
from shearling.data.columns import read_classes
from shearling.data.encoder import Encoder
from shearling.data.rows import Rows
from shearling.errors import DataError

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")
SOUNDS = (".wav",)
_COLUMNS = {"image": ("image", "img", "picture", "file", "path"), "audio": ("audio", "speech", "sound", "file", "path")}


def read_folder(folder: Path, limit: int | None = None) -> Rows:
    """The images or audio files of a folder; subfolders are classes."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES + SOUNDS and not p.name.startswith("."))
    if not paths:
        raise DataError(f"{folder} has no images ({', '.join(IMAGES)}) and no audio files ({', '.join(SOUNDS)})")
    name = "image" if paths[0].suffix.lower() in IMAGES else "audio"
    wanted = IMAGES if name == "image" else SOUNDS
    paths = [p for p in paths if p.suffix.lower() in wanted]
    columns: dict[str, Sequence[Any]] = {name: [str(p) for p in paths]}
    if all(p.parent != folder for p in paths):
        columns["label"] = [p.relative_to(folder).parts[0] for p in paths]
    return Rows(columns, source=str(folder)).head(limit)


def medium_of(processor: Any) -> str | None:
    """The medium of a processor: `image`, `audio`, or None for text."""
    names = list(getattr(processor, "model_input_names", None) or [])
    if "pixel_values" in names and "input_ids" not in names:
        return "image"
    return "audio" if {"input_values", "input_features"} & set(names) else None


@dataclass(frozen=True)
class MediaEncoder(Encoder):
    """An encoder with an image processor or audio feature extractor as its tokenizer.

    An example is one image or audio clip, named `raw` until batches are built.
    """

    def tokenize(self, rows: Rows) -> Tokenized:
        """Read every file or column entry, and labels if there are any and the task has classes."""
        medium = str(medium_of(self.tokenizer))
        column = self._column(rows, medium)
        read = _read_image if medium == "image" else self._read_sound
        raw: list[Any] = [
            read(value, f"row {n} of {rows.source}") for n, value in enumerate(rows.column(column), start=1)
        ]
        name = self.label_name(rows) if self.task.kind == "classification" else None
        if name is None or (self.labels == "optional" and not self._knows(rows.column(name))):
            return Tokenized({"raw": raw})
        return Tokenized({"raw": raw}, {"labels": read_classes(rows, name, self.task, self.config)})

    def batches(self, examples: Tokenized, batch_size: int, *, bucket: bool = True) -> Batches:
        """Run the processor; audio clips of similar length are grouped."""
        sounds = bucket and medium_of(self.tokenizer) == "audio"
        return cut(examples, batch_size, [len(s) for s in examples.tokens["raw"]] if sounds else None, self._stack)

    def _stack(self, examples: Tokenized) -> Tensors:
        raw: Sequence[Any] = examples.tokens["raw"]
        processor: Any = self.tokenizer
        if medium_of(processor) == "image":
            made = processor(images=list(raw), return_tensors="pt")
        else:
            rate = processor.sampling_rate
            whole = {} if "input_features" in processor.model_input_names else {"padding": True}
            made = processor(list(raw), sampling_rate=rate, return_tensors="pt", **whole)
        batch = {name: torch.as_tensor(made[name]) for name in processor.model_input_names if name in made}
        return batch | {name: torch.from_numpy(values) for name, values in examples.values.items()}

    def _column(self, rows: Rows, medium: str) -> str:
        if self.text_columns:
            rows.column(self.text_columns[0])  # raises if it is missing
            return self.text_columns[0]
        for name in _COLUMNS[medium]:
            if name in rows.names:
                return name
        raise DataError(
            f"the model takes {medium} data, but {rows.source} has the columns {list(rows.names)}; give a folder, or "
            f"name the column with --text-columns"
        )

    def _knows(self, labels: Sequence[Any]) -> bool:
        known = {name.lower() for name in self.config.label2id}
        return all(not isinstance(label, str) or label.lower() in known or label.isdigit() for label in labels)

    def _read_sound(self, value: Any, place: str) -> NDArray[np.float32]:
        wanted = getattr(self.tokenizer, "sampling_rate", None)
        sound, rate = _sound_and_rate(value, place)
        if rate is not None and wanted is not None and rate != wanted:
            raise DataError(f"{place} has {rate} samples a second, the model takes {wanted}; resample it first")
        if sound.ndim == 2:
            sound = sound.mean(axis=int(np.argmin(sound.shape)))  # mix the channels
        if not len(sound):
            raise DataError(f"{place} has no audio samples")
        return sound.astype(np.float32)


def _read_image(value: Any, place: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "reading images needs pillow; run: pip install pillow, or give batches of pixel_values"
        ) from error

    if isinstance(value, Mapping):  # an undecoded column of `datasets`
        value = io.BytesIO(value["bytes"]) if value.get("bytes") else value.get("path")
    try:
        if isinstance(value, (str, Path, io.BytesIO)):
            with Image.open(value) as image:
                return image.convert("RGB")
        if isinstance(value, np.ndarray):
            value = Image.fromarray(value)
        return value.convert("RGB")
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{place} is not an image that can be read: {error}") from None


def _sound_and_rate(value: Any, place: str) -> tuple[NDArray[Any], int | None]:
    if isinstance(value, Mapping) and "array" in value:
        return np.asarray(value["array"]), value.get("sampling_rate")
    if isinstance(value, Mapping):
        value = io.BytesIO(value["bytes"]) if value.get("bytes") else value.get("path")
    if not isinstance(value, (str, Path, io.BytesIO)):
        try:
            return np.asarray(value, dtype=np.float32), None
        except (TypeError, ValueError):
            raise DataError(f"{place} is not audio: give a .wav file or a list of samples") from None
    try:
        with wave.open(str(value) if isinstance(value, Path) else value) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise DataError(f"{place} is not a .wav file that can be read: {error}") from None
    if width not in (1, 2, 4):
        raise DataError(f"{place} has samples of {8 * width} bits; give 8, 16 or 32")
    kind = {1: np.uint8, 2: np.int16, 4: np.int32}[width]
    zero, full = (128.0, 128.0) if width == 1 else (0.0, float(2 ** (8 * width - 1)))
    samples = ((np.frombuffer(frames, kind) - zero) / full).astype(np.float32)
    return samples.reshape(-1, channels) if channels > 1 else samples, rate
