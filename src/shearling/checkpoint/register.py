"""Teach transformers to load pruned checkpoints, without importing it before anyone else does.

`import shearling` must make `AutoModel.from_pretrained(directory)` work, yet stay quick. So when transformers is not
imported yet, a finder waits for its quantizer registry and registers ours right after it has been executed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

REGISTRY = "transformers.quantizers.auto"


def register_when_needed() -> None:
    """Register now if transformers' registry is there, or as soon as it is."""
    if REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    from shearling.models import modeling_shearling

    modeling_shearling.register()


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader of the one module it waits for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """Executes the module as its own loader would, then registers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()
