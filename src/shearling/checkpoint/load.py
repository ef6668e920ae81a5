"""Read a pruned model back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.fields import MAX_SIZE, is_count, wrong_field
from shearling.errors import CheckpointError
from shearling.files import RECORD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_JSON = 256 * 2**20  # bytes; a record of a large model is a few megabytes
MAX_LAYERS = 1024
MAX_LABELS = 2**20


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
    config = read_json(folder / "config.json")
    check_edits(config.get("quantization_config"), folder)
    _check_sizes({name: value for name, value in config.items() if name != "quantization_config"}, folder)
    check_index(folder)
    return record, config


def _check_sizes(value: Any, folder: Path, name: str = "") -> None:
    """No size in the configuration may keep transformers busy for ever before it sees that the weights do not fit."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_sizes(inner, folder, key)
    elif isinstance(value, list):
        for inner in value:
            _check_sizes(inner, folder, name)
    elif isinstance(value, (int, float)):
        most = MAX_LAYERS if "layer" in name else MAX_LABELS if name == "num_labels" else MAX_SIZE
        if "layer" in name and isinstance(value, float):  # layer_norm_eps and the like
            most = MAX_SIZE
        if not abs(value) <= most:
            raise CheckpointError(f"{folder}/config.json: '{name}' is more than {most}; it was changed.")


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
    record = read_json(folder / RECORD)
    wrong = wrong_field(record)
    if wrong is not None:
        raise CheckpointError(f"{folder / RECORD}: '{wrong}' is not what shearling writes there; it was changed.")
    if len(record["layers"]) != len(record["dense_layers"]):
        raise CheckpointError(f"{folder / RECORD}: 'layers' and 'dense_layers' differ in length; it was changed.")
    return record


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file of sane size."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path} is larger than {MAX_JSON >> 20} MiB; it is no such file of ours.")
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold an object, not a {type(value).__name__}.")
    return value


def check_index(folder: Path) -> None:
    """Weights in several files are listed in an index; a name in it must not lead out of the directory."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    files = read_json(index).get("weight_map")
    for name in files.values() if isinstance(files, dict) else [files]:
        if not isinstance(name, str) or name in ("", "..") or name != Path(name).name:
            raise CheckpointError(f"{index} names {name!r}, which is no file of the directory; it was changed.")


def check_edits(config: Any, folder: Path) -> None:
    """Refuse edits that no version of shearling writes, before anything acts on them."""
    if not isinstance(config, dict) or config.get("quant_method") != "shearling":
        raise CheckpointError(f"{folder}/config.json does not say how the model was reshaped; it was changed.")
    edits = config.get("edits")
    if not isinstance(edits, dict) or not {"linear", "attributes", "bias_only", "hollow"} <= edits.keys():
        raise CheckpointError(f"The edits in {folder}/config.json are incomplete; it was changed.")
    ok = (
        isinstance(edits["linear"], dict)
        and all(_size(s) for s in edits["linear"].values())
        and isinstance(edits["attributes"], dict)
        and all(is_count(v) for v in edits["attributes"].values())
        and isinstance(edits["bias_only"], list)
        and all(isinstance(p, str) for p in edits["bias_only"])
        and isinstance(edits["hollow"], dict)
        and all(_stub(v) for v in edits["hollow"].values())
        and isinstance(edits.get("picks", {}), dict)
        and all(_pick(v) for v in edits.get("picks", {}).values())
    )
    if not ok:
        raise CheckpointError(f"The edits in {folder}/config.json hold values that shearling never writes.")


def _size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_count(v) for v in value)


def _stub(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and is_count(value[1])


def _pick(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"argument", "heads", "made_by", "returned"}
        and isinstance(value["argument"], str)
        and isinstance(value["heads"], list)
        and all(is_count(head) for head in value["heads"])
        and isinstance(value["made_by"], str)
        and (not value["made_by"] or value["made_by"].isidentifier())
        and type(value["returned"]) is int
        and -1 <= value["returned"] < 8
    )


def _model_class(config: dict[str, Any], folder: Path) -> Any:
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise CheckpointError(f"{folder}/config.json names the model class {name!r}, which transformers does not have.")
    return found
