"""Read a pruned model back."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling import schema
from shearling.checkpoint.register import upgraded
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
        model, info = _model_class(config, folder, kwargs.get("trust_remote_code")).from_pretrained(folder, **kwargs)
        check_weights(model, without_pooler(model, info["missing_keys"]), record, folder)
    except CheckpointError:
        raise
    except Exception as error:  # transformers may fail anywhere on a file that was changed
        raise CheckpointError(f"{folder} does not load: {error}") from error
    loaded: PreTrainedModel = model
    return loaded


def check_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record and the configuration of a checkpoint, checked so that loading is safe."""
    record = read_record(folder)
    path = folder / "config.json"
    config = upgraded(schema.CONFIG.read(path))
    check_index(folder)
    if record.get("shape") != "stock":
        schema.PRUNED_CONFIG.check(config, path)
        check_shapes(config["shearling"]["edits"]["linear"], folder)
    return record, config


def without_pooler(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """The weights that are missing beside the pooler of a bare encoder, which does not use the one it lacks.

    It is zeros then, not transformers' random numbers.
    """
    if model.base_model is not model:
        return missing
    for name, weight in model.named_parameters():
        if name.startswith("pooler.") and name in missing:
            weight.data.zero_()
    return {name for name in missing if not name.startswith("pooler.")}


def check_weights(model: PreTrainedModel, missing: set[str], record: dict[str, Any], folder: Path) -> None:
    """Transformers fills missing weights with random numbers."""
    from shearling.models.structure import structure_of

    if missing:
        raise CheckpointError(f"{folder} has no weights for {sorted(missing)[:3]}; the files were changed.")
    if getattr(model, "is_quantized", False):
        return  # the quantiser has packed the weights; `check_shapes` has compared them before
    sizes, told = structure_of(model).sizes, record["layers"]
    if record.get("shape") == "stock":  # it may lack some of the dense model's layers
        told = [layer for layer in told if any(layer.values())]
    # Records of earlier versions do not count cross-attention.
    if len(sizes) != len(told) or any({**now, **then} != now for now, then in zip(sizes, told, strict=True)):
        raise CheckpointError(f"{folder / RECORD} tells of other layers than the weights have; the files were changed.")


def check_shapes(linear: dict[str, list[int]], folder: Path) -> None:
    """The weights in the files must have the shapes that config.json gives: a quantiser would not compare them."""
    for name, shape in _shapes_in(folder).items():
        path = name.removesuffix(".weight")
        size = linear.get(path) or linear.get(path.partition(".")[2])  # with and without the name of the base model
        if size is not None and path != name and sorted(shape) != sorted(size):  # Conv1D keeps [inputs, outputs]
            raise CheckpointError(
                f"'{name}' in {folder} has weights of shape {tuple(shape)}, but its config.json says {tuple(size)}; "
                "the files were changed."
            )


def _shapes_in(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in the weight files, from their headers. Damage is for the loader to report."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    with suppress(OSError, SafetensorError):
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(path, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return shapes


def read_record(folder: Path) -> dict[str, Any]:
    """`shearling.json`, checked."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory; give the folder that `shearling prune --out` wrote.")
    if not (folder / RECORD).is_file():
        raise CheckpointError(
            f"{folder} has no {RECORD}: it is not a model that shearling wrote, or not a whole one. "
            "A pruned model that transformers saved loads with from_pretrained, after `import shearling`."
        )
    found: dict[str, Any] = schema.RECORD.read(folder / RECORD)
    return found


def check_index(folder: Path) -> None:
    """Weights in several files are listed in an index; a name in it must not lead out of the directory."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        schema.INDEX.read(index)


def _model_class(config: dict[str, Any], folder: Path, trusted: Any) -> Any:
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if own := own_class(name, config.get("shearling", config).get("auto_map")):  # stock shapes have no entry of ours
        if not trusted:
            raise CheckpointError(
                f"{folder} is a {name}, a class that comes with the model; load it with trust_remote_code=True, which "
                "runs its code."
            )
        return getattr(transformers, own)
    found = class_named(name)
    if found is None:
        raise CheckpointError(f"{folder}/config.json names the model class {name!r}, which transformers does not have.")
    return found


def own_class(name: Any, references: Any) -> str | None:
    """The `AutoModel...` that gives the class of this name, by an `auto_map` (`{AutoModel...: file.class}`)."""
    own = references if isinstance(references, dict) else {}
    found = (auto for auto, place in own.items() if auto.startswith("AutoModel") and str(place).split(".")[-1] == name)
    return next(found, None)


def class_named(name: Any) -> Any:
    """The model class of transformers with this name; None where there is none."""
    import transformers

    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None
