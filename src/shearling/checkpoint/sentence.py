"""Directories of sentence-transformers: a transformer followed by pooling and other modules.

`modules.json` lists them. The transformer is pruned; the rest is copied, so that the result loads with
`SentenceTransformer(directory)` after `import shearling`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from shearling import schema
from shearling.errors import ModelError
from shearling.models.pooling import ACTIVATIONS, DenseModule, Mode, Pooling, parse_pooling, pooling_of, set_pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"  # without a list of modules
# Modes of sentence-transformers -> (our name, flag `pooling_mode_...` in older files), in order of concatenation.
_MODES: dict[str, tuple[Mode, str]] = {
    "cls": ("cls", "cls_token"),
    "max": ("max", "max_tokens"),
    "mean": ("mean", "mean_tokens"),
    "mean_sqrt_len_tokens": ("mean_sqrt_len", "mean_sqrt_len_tokens"),
    "weightedmean": ("weighted_mean", "weightedmean_tokens"),
    "lasttoken": ("last", "lasttoken"),
}
_IGNORED = ("Dropout",)  # identity outside training

_log = logging.getLogger("shearling")


def transformer_in(folder: Path) -> Path | None:
    """The folder of the transformer; None if this is not a directory of sentence-transformers."""
    if not (folder / MODULES).is_file():
        return None
    for module in schema.MODULES.read(folder / MODULES):
        if _kind(module) == "Transformer":
            return folder / str(module.get("path", ""))
    raise ModelError(f"{folder / MODULES} lists no transformer; there is nothing to prune in it.")


def is_embedder(name: str) -> bool:
    """Whether a directory or Hub id is a sentence-transformers model for embeddings, not a CrossEncoder."""
    if _modules_of(name) is None:
        return False
    return (_read(name, SETTINGS) or {}).get("model_type") in (None, "SentenceTransformer")


def modules_with_transformer_on_top(folder: Path) -> str:
    """`modules.json` with the transformer at the top level of the directory."""
    modules = [
        module | {"path": ""} if _kind(module) == "Transformer" else module
        for module in schema.MODULES.read(folder / MODULES)
    ]
    return json.dumps(modules, indent=2) + "\n"


def attach_pooling(model: PreTrainedModel, name: str | None = None, pooling: str | Pooling | None = None) -> None:
    """Attach a pooling to the model: the given one, that of its directory or Hub id, or else mean pooling.

    A pooling attached before is kept if neither of the first two exists.
    """
    name = name or getattr(model, "name_or_path", "") or ""
    found = read_pooling(name)
    if pooling is not None:
        given = parse_pooling(pooling) if isinstance(pooling, str) else pooling
        if found is None or isinstance(pooling, Pooling):
            found = given
        else:
            found = replace(found, modes=given.modes, normalize=found.normalize or given.normalize)
    if found is not None:
        set_pooling(model, found)
    elif pooling_of(model).guessed:
        _log.warning(
            "no file of %s says how its embeddings are pooled: using the mean over real tokens. "
            "Set pooling= (--pooling cls, last, max, ...) if it differs.",
            name or "the model",
        )


def read_pooling(name: str) -> Pooling | None:
    """The pooling of the embedding model in a directory or Hub id, or None."""
    modules = _modules_of(name)
    if modules is None:
        config = _read(name, POOLING)
        return None if config is None else Pooling(modes_of(config, POOLING))
    if not is_embedder(name):
        return None
    parts = []
    for module in modules:
        kind, path = _kind(module), module.get("path", "")
        weights = _find(name, f"{path}/model.safetensors") if kind == "Dense" else None
        read = kind in ("Pooling", "Dense")
        config = (_read(name, f"{path}/config.json") or {}) if read else {}
        parts.append(SentenceModule(kind, config, None if weights is None else load_file(weights), f"{path} of {name}"))
    return pooling_of_parts(parts, _read(name, SETTINGS) or {}, _max_length(name, modules))


class SentenceModule(NamedTuple):
    """A module of sentence-transformers: its class, configuration, optional weights, and location for messages."""

    kind: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor] | None
    where: str


def pooling_of_parts(
    parts: Iterable[SentenceModule], settings: Mapping[str, Any], max_length: int | None
) -> Pooling | None:
    """The pooling defined by the modules; None without a pooling module, as in a CrossEncoder."""
    modes: tuple[Mode, ...] | None = None
    dense: list[DenseModule] = []
    normalize = False
    for part in parts:
        if part.kind == "Pooling":
            modes = modes_of(part.config, part.where)
            if part.config.get("include_prompt") is False:
                _log.warning("%s leaves prompts out of the pooling; shearling pools them too", part.where)
        elif part.kind == "Normalize":
            normalize = True
        elif part.kind == "Dense" and modes is not None:
            dense.append(_projection(part))
        elif part.kind not in ("Transformer", "Dense", *_IGNORED):
            _log.warning("%s is a %s, which shearling leaves out of its scores", part.where, part.kind)
    if modes is None:
        return None
    prompts = {str(key): str(text) for key, text in (settings.get("prompts") or {}).items() if text is not None}
    similarity = str(settings.get("similarity_fn_name") or "cosine")
    default = settings.get("default_prompt_name")
    return Pooling(modes, normalize, similarity, tuple(dense), prompts, default, max_length)


def modes_of(config: Mapping[str, Any], where: str) -> tuple[Mode, ...]:
    """The modes in a Pooling module's configuration, old or new format."""
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for mode, (_, flag) in _MODES.items() if config.get(f"pooling_mode_{flag}")] or ["mean"]
    names = [given] if isinstance(given, str) else list(given)
    unknown = [name for name in names if name not in _MODES]
    if unknown:
        raise ModelError(f"{where} asks for the pooling {unknown[0]!r}; shearling knows {', '.join(_MODES)}.")
    return tuple(_MODES[name][0] for name in names)


def _projection(part: SentenceModule) -> DenseModule:
    """A Dense module; its weights are read only from safetensors, never from a pickle."""
    activation = str(part.config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if part.weights is None or activation not in ACTIVATIONS or part.config.get("use_residual"):
        unknown = f"activation {activation} (or a residual), which shearling does not know"
        why = "no model.safetensors" if part.weights is None else unknown
        raise ModelError(f"{part.where} has {why}; give pooling= to score without it (--pooling mean).")
    return DenseModule(part.weights["linear.weight"], part.weights.get("linear.bias"), activation)


def _max_length(name: str, modules: list[dict[str, Any]]) -> int | None:
    """Maximum tokens of a text, from the transformer's settings."""
    path = next((module.get("path", "") for module in modules if _kind(module) == "Transformer"), "")
    settings = _read(name, f"{path}/sentence_bert_config.json".lstrip("/")) or {}
    length = settings.get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


def _kind(module: dict[str, Any]) -> str:
    """The class name of a module: `sentence_transformers.models.Pooling` -> Pooling."""
    return str(module.get("type", "")).rpartition(".")[2]


def _find(name: str, file: str) -> Path | None:
    """A file of a directory or Hub id (from the cache if there is no network), or None."""
    if not name or Path(name).exists():
        path = Path(name) / file
        return path if name and path.is_file() else None
    from transformers.utils import cached_file

    quietly = dict.fromkeys(("missing_entries", "connection_errors", "gated_repo"), False)
    try:
        found = cached_file(name, file, **{f"_raise_exceptions_for_{what}": no for what, no in quietly.items()})
    except (OSError, ValueError):  # unknown id; loading the model gives a better message
        return None
    return None if found is None else Path(os.fspath(found))


def _read(name: str, file: str) -> dict[str, Any] | None:
    """A JSON file of a model, or None."""
    path = _find(name, file)
    if path is None:
        return None
    found: dict[str, Any] = schema.SETTINGS.read(path)
    return found


def _modules_of(name: str) -> list[dict[str, Any]] | None:
    """The module list of a directory or Hub id, or None."""
    path = _find(name, MODULES)
    return None if path is None else schema.MODULES.read(path)
