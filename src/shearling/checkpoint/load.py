"""Read a pruned model back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling import schema
from shearling.errors import CheckpointError
from shearling.files import RECORD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(directory: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """The pruned model with the head it was saved with; keywords go to `from_pretrained`."""
    folder = Path(directory)
    record, config = check_files(folder)
    kwargs |= {"output_loading_info": True, "use_safetensors": True}  # the other format is a pickle: never
    try:
        model, info = _model_class(config, folder).from_pretrained(folder, **kwargs)
        check_weights(model, info["missing_keys"], record, folder)
    except CheckpointError:
        raise
    except Exception as error:  # a changed file may trip transformers anywhere
        raise CheckpointError(f"{folder} does not load: {error}") from error
    loaded: PreTrainedModel = model
    return loaded


def check_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record and the configuration of a checkpoint, once nothing in them could lead a loader astray."""
    record = read_record(folder)
    config = schema.PRUNED_CONFIG.read(folder / "config.json")
    check_index(folder)
    return record, config


def check_weights(model: PreTrainedModel, missing: set[str], record: dict[str, Any], folder: Path) -> None:
    """Transformers fills missing weights with random numbers, and after a quantizer it does not compare shapes."""
    from torch import nn

    from shearling.models.structure import structure_of

    if missing:
        raise CheckpointError(f"{folder} has no weights for {sorted(missing)[:3]}; the files were changed.")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.shape != (module.out_features, module.in_features):
            raise CheckpointError(
                f"'{name}' in {folder} has weights of shape {tuple(module.weight.shape)}, but its config.json says "
                f"({module.out_features}, {module.in_features}); the files were changed."
            )
    if structure_of(model).sizes != record["layers"]:
        raise CheckpointError(f"{folder / RECORD} tells of other layers than the weights have; the files were changed.")


def read_record(folder: Path) -> dict[str, Any]:
    """`shearling.json`, checked."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory; give the folder that `shearling prune --out` wrote.")
    if not (folder / RECORD).is_file():
        raise CheckpointError(f"{folder} has no {RECORD}: it is not a model that shearling wrote, or not a whole one.")
    found: dict[str, Any] = schema.RECORD.read(folder / RECORD)
    return found


def check_index(folder: Path) -> None:
    """Weights in several files are listed in an index; a name in it must not lead out of the directory."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        schema.INDEX.read(index)


def _model_class(config: dict[str, Any], folder: Path) -> Any:
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise CheckpointError(f"{folder}/config.json names the model class {name!r}, which transformers does not have.")
    return found
