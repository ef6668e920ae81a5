"""Make transformers load pruned checkpoints, without importing it earlier than the user does.

`import shearling` must make `AutoModel.from_pretrained(directory)` work, yet stay quick. So what transformers has not
imported yet is changed right after it has been executed: how it reads `config.json`, and how it builds a model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def register_when_needed() -> None:
    """Register now what transformers has imported, and the rest as soon as it is."""
    for name, register in _REGISTERED.items():
        if name in sys.modules:
            register()
        elif not any(isinstance(finder, _Waiting) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Waiting(name))


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a `config.json` of any version of shearling as this one keeps them, without the notice to others.

    0.1 kept the shapes under `quantization_config`, where they were in the way of every quantiser.
    """
    old = config.get("quantization_config")
    if isinstance(old, dict) and old.get("quant_method") == "shearling":
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        config["shearling"] = {"version": 1, "edits": old.get("edits")}
    shapes = config.get("shearling")
    if isinstance(shapes, dict) and not shapes.get("auto_map"):  # a class that comes with it needs the file beside it
        config = {key: value for key, value in config.items() if key != "transformers_weights"}
    return config


def _register_config() -> None:
    """Have transformers read every `config.json` through `upgraded`; doing it twice changes nothing."""
    from transformers.configuration_utils import PreTrainedConfig

    read = PreTrainedConfig.get_config_dict.__func__
    if hasattr(read, "shearling"):
        return

    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        config, unused = read(cls, *args, **kwargs)
        return upgraded(config), unused

    vars(get_config_dict).update(shearling=True)
    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)


def _register_model() -> None:
    import shearling.models.modeling_shearling  # noqa: F401  it registers itself, also in the middle of being imported


_REGISTERED: dict[str, Callable[[], None]] = {
    "transformers.configuration_utils": _register_config,
    "transformers.modeling_utils": _register_model,
}


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself; changes the loader of the one module it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, _REGISTERED[fullname])
        return spec


def _run_after(loader: Any, register: Callable[[], None]) -> None:
    """Have the loader register once it has executed its module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        register()

    loader.exec_module = exec_module
