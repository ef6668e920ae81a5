"""Make transformers load pruned checkpoints, without importing it earlier than the user does.

`import shearling` must make `AutoModel.from_pretrained(directory)` work but stay fast. So two modules of transformers
are patched after they are imported: the one that reads `config.json`, and the one that builds models.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def register_when_needed() -> None:
    """Patch the modules that are imported now, and the others once they are."""
    for name, register in _REGISTERED.items():
        if name in sys.modules:
            register()
        elif not any(isinstance(finder, _Waiting) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Waiting(name))


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of `config.json` from any version of shearling to this one, without the loading notice.

    Version 0.1 stored the shapes under `quantization_config`, which conflicted with quantisers.
    """
    old = config.get("quantization_config")
    if isinstance(old, dict) and old.get("quant_method") == "shearling":
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        config["shearling"] = {"version": 1, "edits": old.get("edits")}
    shapes = config.get("shearling")
    if isinstance(shapes, dict) and not shapes.get("auto_map"):  # custom classes load through the shipped file instead
        config = {key: value for key, value in config.items() if key != "transformers_weights"}
    return config


def _register_config() -> None:
    """Make transformers read every `config.json` through `upgraded`; idempotent."""
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
    import shearling.models.modeling_shearling  # noqa: F401  registers itself on import


_REGISTERED: dict[str, Callable[[], None]] = {
    "transformers.configuration_utils": _register_config,
    "transformers.modeling_utils": _register_model,
}


class _Waiting(importlib.abc.MetaPathFinder):
    """A finder that patches the loader of one module when it is imported."""

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
    """Make the loader call `register` after executing its module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        register()

    loader.exec_module = exec_module
