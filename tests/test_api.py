"""What `import shearling` gives, and what it does not drag in."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest

import shearling


def test_all_is_sorted_and_complete() -> None:
    assert shearling.__all__ == sorted(shearling.__all__)
    assert len(set(shearling.__all__)) == len(shearling.__all__)
    assert dir(shearling) == shearling.__all__
    assert set(shearling._HOME_OF) < set(shearling.__all__) < {*shearling._HOME_OF, *vars(shearling)}


@pytest.mark.parametrize("name", shearling.__all__)
def test_every_name_can_be_had(name: str) -> None:
    value = getattr(shearling, name)
    assert value is not None
    assert not isinstance(value, ModuleType)
    assert isinstance(value, str) or value.__doc__


WORKFLOWS = ("compare", "evaluate", "export", "measure", "profile", "prune", "sweep")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_parameter_is_documented(name: str) -> None:
    """In the function's own words, or in those of the function that it refers to."""
    words = getattr(shearling, name).__doc__
    words += "".join(getattr(shearling, other).__doc__ for other in WORKFLOWS if f"`shearling.{other}`" in words)
    for parameter in inspect.signature(getattr(shearling, name)).parameters.values():
        assert re.search(rf"\b{parameter.name}\b", words), parameter.name
        assert parameter.annotation is not inspect.Parameter.empty


# What only a terminal needs, and what is set on a method object in Python.
TERMINAL = {"image_size", "mean", "std"}  # a processor, given as `tokenizer`, in Python
TERMINAL |= {"as_json", "budget", "dry_run", "html", "length", "plot", "quiet", "record", "report"}
SETTINGS = {
    "settings", "labels", "refit", "realign", "polish",
    "importance", "allocation", "rearrange", "tune", "drop_sublayers",
}  # fmt: skip
SPELT = {"evaluation": "eval", "eval_": "eval", "format_": "format", "compiled": "compile"}


@pytest.mark.parametrize("name", ["compare", "evaluate", "export", "profile", "prune", "sweep"])
def test_options_and_parameters_have_the_same_words(name: str) -> None:
    command = getattr(importlib.import_module(f"shearling.cli.{name}"), name)
    options = {SPELT.get(option, option) for option in inspect.signature(command).parameters} - TERMINAL - SETTINGS
    written = {"compare": {"force"}, "profile": {"out", "force"}, "prune": {"out", "force"}}.get(name, set())
    assert options - written <= set(inspect.signature(getattr(shearling, name)).parameters)


def test_every_error_is_one_of_ours() -> None:
    from shearling import errors

    ours = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.ShearlingError)}
    assert ours <= set(shearling.__all__)
    drawn = errors.__doc__ or ""
    assert all(name in drawn for name in ours)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shearling.nothing  # noqa: B018


def loaded_after(code: str) -> set[str]:
    """What a fresh process imports for the code."""
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('modules', *sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    last = result.stdout.strip().splitlines()[-1]
    return {name.partition(".")[0] for name in last.split()[1:]}


HEAVY = {"torch", "transformers", "numpy", "datasets", "sklearn", "matplotlib", "onnx", "onnxruntime", "pandas"}
HEAVY |= {"accelerate", "pyarrow"}


def test_importing_stays_light() -> None:
    assert not loaded_after("import shearling") & (HEAVY | {"rich", "typer"})


def test_help_needs_no_torch() -> None:
    code = (
        "from shearling.cli import run\nfor a in (['--help'], ['prune', '--help'], ['--version']): assert run(a) == 0"
    )
    assert not loaded_after(code) & HEAVY
