"""Image preprocessing for models without a processor file: resize, scale and normalise by options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from shearling.checkpoint.pretrained import load_reader
from shearling.errors import InputError

_log = logging.getLogger(__name__)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageOptions:
    """Image preprocessing, instead of the model's own processor.

    size       pixels per side; default: the configuration's `image_size`
    mean, std  of the colour channels, one number or three; default: ImageNet's
    """

    size: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.size, self.mean, self.std))


@dataclass(frozen=True)
class PlainImages:
    """A processor that resizes every image to height x width."""

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    model_input_names: ClassVar[list[str]] = ["pixel_values"]

    def __call__(self, images: Sequence[Any], return_tensors: str = "pt") -> dict[str, torch.Tensor]:
        """[B, 3, height, width] of PIL images."""
        pixels = np.stack([np.asarray(image.resize((self.width, self.height)), dtype=np.float32) for image in images])
        values = (pixels / 255 - np.array(self.mean)) / np.array(self.std)  # [B, height, width, 3]
        return {"pixel_values": torch.from_numpy(values.astype(np.float32).transpose(0, 3, 1, 2).copy())}


def reader_of(name: str, model: Any, options: ImageOptions | None = None, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer or processor of a model; for images, the options can replace it."""
    if model.main_input_name != "pixel_values":
        if options:
            raise InputError(f"--image-size, --mean and --std are for images; this {type(model).__name__} takes none.")
        return load_reader(name, model, trust_remote_code=trust_remote_code)
    folder = Path(name)
    if not options and not (folder.is_dir() and not any((folder / file).is_file() for file in FILES)):
        return load_reader(name, model, trust_remote_code=trust_remote_code)
    return plain_images(model.config, options or ImageOptions())


def plain_images(config: Any, options: ImageOptions) -> PlainImages:
    """The processor with these options."""
    own = getattr(config, "vision_config", None) or config  # a classifier on a tower of CLIP has both
    size = options.size or getattr(own, "image_size", None)
    if size is None:
        raise InputError("The configuration does not say how large images are; give --image-size, such as 224.")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if options.mean is None or options.std is None:
        _log.warning(
            "no processor file: images are normalised with ImageNet's mean and deviation; ViT and BEiT want "
            "--mean 0.5 --std 0.5"
        )
    mean, std = (_colours(name, given) for name, given in (("mean", options.mean or MEAN), ("std", options.std or STD)))
    if min(std) <= 0:
        raise InputError(f"--std {min(std):g} makes no sense; deviations are above 0.")
    return PlainImages(int(height), int(width), mean, std)


def _colours(name: str, given: Sequence[float]) -> tuple[float, ...]:
    if len(given) not in (1, 3):
        raise InputError(f"--{name} takes one number or three, red, green and blue; {len(given)} were given.")
    return tuple(map(float, given)) * (3 // len(given))
