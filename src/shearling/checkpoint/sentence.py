"""Directories of sentence-transformers: a transformer, and the pooling and other modules that come after it.

`modules.json` lists them. The transformer is what is pruned; the rest is carried over as it is, so that the result
loads with `SentenceTransformer(directory)` after `import shearling`.
"""

from __future__ import annotations

import json
from pathlib import Path

from shearling import schema
from shearling.errors import ModelError

MODULES = "modules.json"


def transformer_in(folder: Path) -> Path | None:
    """Where the transformer lies (in the folder itself, or in one of its own); None if this is no such directory."""
    if not (folder / MODULES).is_file():
        return None
    for module in schema.MODULES.read(folder / MODULES):
        if str(module.get("type", "")).endswith(".Transformer"):
            return folder / str(module.get("path", ""))
    raise ModelError(f"{folder / MODULES} lists no transformer; there is nothing to prune in it.")


def modules_with_transformer_on_top(folder: Path) -> str:
    """`modules.json` for a copy of the directory in which the transformer lies on top."""
    modules = [
        module | {"path": ""} if str(module.get("type", "")).endswith(".Transformer") else module
        for module in schema.MODULES.read(folder / MODULES)
    ]
    return json.dumps(modules, indent=2) + "\n"
