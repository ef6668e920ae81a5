"""Packages import downwards only, also inside functions: CONTRIBUTING.md says why each one is where it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shearling

SOURCE = Path(shearling.__file__).parent

# From the bottom up: each may import itself and what stands before it.
LAYERS = (
    "_version", "errors", "hidden", "files", "schema", "sample", "models", "engine", "costs", "surgeon", "paper",
    "estimate", "methods", "latency", "target",
    "report", "checkpoint", "verify", "pipeline", "data", "evaluation", "exporters", "integrations",
    "workflows", "cli",
)  # fmt: skip
ENTRANCES = {"__init__", "__main__"}  # what users import or run: they may see everything


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, first name below `shearling`) of every import in a file, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "shearling":
            modules = [f"shearling.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        else:
            continue
        yield from ((node.lineno, m.split(".")[1]) for m in modules if m.startswith("shearling."))


def test_every_package_has_its_layer() -> None:
    found = {layer_of(path) for path in SOURCE.rglob("*.py")} - ENTRANCES
    assert found == set(LAYERS)


def test_imports_go_down() -> None:
    height = {name: number for number, name in enumerate(LAYERS)}
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if layer_of(path) not in ENTRANCES
        for line, name in imports_of(path)
        if height[name] > height[layer_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_absolute() -> None:
    """A relative import would hide its layer from the test above."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno}"
