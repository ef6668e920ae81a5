"""Load a pruned model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling import schema
from shearling.checkpoint.register import upgraded
from shearling.errors import CheckpointError, ModelError
from shearling.files import RECORD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(directory: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """Load a pruned model with the head it was saved with; keywords are passed to `from_pretrained`."""
    folder = Path(directory)
    record, config = check_files(folder)
    kwargs |= {"output_loading_info": True, "use_safetensors": True}  # never a pickle
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    auto_maps = (config.get("shearling") or {}).get("auto_map"), config.get("auto_map")
    try:
        found = model_class(name, auto_maps, folder, trusted=bool(kwargs.get("trust_remote_code")), pruned=True)
        model, info = found.from_pretrained(folder, **kwargs)
        check_weights(model, without_pooler(model, info["missing_keys"]), record, folder)
    except CheckpointError:
        raise
    except ModelError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # transformers may raise anything for a damaged file
        raise CheckpointError(f"{folder} does not load: {error}") from error
    loaded: PreTrainedModel = model
    return loaded


def check_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read and check the record and configuration of a checkpoint."""
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
    """Raise if weights are missing, which transformers fills with random numbers, or do not match the record."""
    from shearling.models.structure import structure_of

    if missing:
        raise CheckpointError(f"{folder} has no weights for {sorted(missing)[:3]}; the files were changed.")
    if getattr(model, "is_quantized", False):
        return  # packed by the quantiser; `check_shapes` has compared the shapes
    sizes, recorded = structure_of(model).sizes, record["layers"]
    if record.get("shape") == "stock":  # removed layers have no units in the record
        recorded = [layer for layer in recorded if any(layer.values())]
    # Records of earlier versions do not count cross-attention.
    if len(sizes) != len(recorded) or any({**now, **then} != now for now, then in zip(sizes, recorded, strict=True)):
        raise CheckpointError(f"{folder / RECORD} has other layers than the weights; the files were changed.")


def check_shapes(linear: dict[str, list[int]], folder: Path) -> None:
    """Check the shapes in the weight files against config.json, since quantisers do not."""
    for name, shape in _shapes_in(folder).items():
        path = name.removesuffix(".weight")
        size = linear.get(path) or linear.get(path.partition(".")[2])  # with and without the base model's prefix
        if size is not None and path != name and sorted(shape) != sorted(size):  # Conv1D stores [inputs, outputs]
            raise CheckpointError(
                f"'{name}' in {folder} has weights of shape {tuple(shape)}, but its config.json says {tuple(size)}; "
                "the files were changed."
            )


def _shapes_in(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in the weight files, from their headers; damaged files are left to the loader."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    with suppress(OSError, SafetensorError):
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(path, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return shapes


def read_record(folder: Path) -> dict[str, Any]:
    """Read and check `shearling.json`."""
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
    """Check that the index of sharded weights names only files in the directory."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        schema.INDEX.read(index)


def model_class(name: Any, auto_maps: Sequence[Any], place: Path | str, *, trusted: bool, pruned: bool) -> Any:
    """The model class of a checkpoint: of transformers or, if trusted, custom.

    auto_maps  `{AutoModel...: file.class}`, the first that is not empty names the custom classes
    pruned     whether shearling wrote it: a custom class is then never replaced by one of transformers of that name
    """
    import transformers

    named = next((one for one in auto_maps if isinstance(one, dict) and one), {})
    own = (auto for auto, path in named.items() if auto.startswith("AutoModel") and str(path).split(".")[-1] == name)
    custom = next(own, None)
    if custom and trusted:
        return getattr(transformers, custom)  # imports the custom class
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and not (custom and pruned):
        return found
    hint = " It is custom code of the model; trust_remote_code=True (--trust-remote-code) runs it." if custom else ""
    raise ModelError(f"{place} is a {name}, a model that transformers {transformers.__version__} does not have.{hint}")
