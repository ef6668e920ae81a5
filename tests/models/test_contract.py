"""What every row of the architecture table must do, on a tiny random model of each family."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shearling
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from shearling.models.table import ROWS
from shearling.passes import masked
from tiny import batches_of, inputs_of, model_of

FAMILIES = [name for row in ROWS for name in row.model_types]
every_family = pytest.mark.parametrize("family", FAMILIES)


def some_kept(structure: Any, seed: int = 0, empty: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """A random choice of units that stay; none in the sublayers named as empty."""
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for number, sublayer in enumerate(structure.sublayers):
        count = int(torch.randint(1, sublayer.units, (1,), generator=generator))
        count = sublayer.floor if number in empty else max(count, sublayer.floor)
        kept.append(torch.randperm(sublayer.units, generator=generator)[:count].sort().values)
    return kept


def masks_of(structure: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    masks = [torch.zeros(s.units) for s in structure.sublayers]
    for mask, units in zip(masks, kept, strict=True):
        mask[units] = 1
    return masks


@every_family
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("empty", [(), (0, 1, 2, 3)], ids=["some", "nothing-left"])
def test_masked_equals_shrunk(family: str, attention: str, empty: tuple[int, ...]) -> None:
    model = model_of(family, attn_implementation=attention)
    inputs = inputs_of(batches_of(1)[0])
    structure = structure_of(model)
    kept = some_kept(structure, empty=empty)
    with torch.no_grad(), masked(structure.sublayers, masks_of(structure, kept)):
        expected = model(**inputs).logits
    small = shrink(model, kept)
    with torch.no_grad():
        torch.testing.assert_close(small(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
    assert [s.units for s in structure_of(small).sublayers] == [len(units) for units in kept]


@every_family
def test_shrink_keeps_dtype_grad_and_mode(family: str) -> None:
    model = model_of(family).to(torch.bfloat16)
    model.base_model.requires_grad_(False)
    small = shrink(model, some_kept(structure_of(model)))
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in small.base_model.parameters())
    assert small.training == model.training
    with torch.no_grad():
        assert small(**inputs_of(batches_of(1)[0])).logits.isfinite().all()


@every_family
@pytest.mark.parametrize("method", ["surgeon", "paper"])
def test_prune_save_load(family: str, method: str, tmp_path: Path) -> None:
    model = model_of(family)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    pruned = shearling.prune(model, batches_of(), flops=0.5, method=method)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert pruned.report.flops.ratio <= 0.5
    pruned.save(tmp_path / "small")
    inputs = inputs_of(batches_of(1, seed=1)[0])
    with torch.no_grad():
        expected = pruned.model(**inputs).logits
        loaded = shearling.load(tmp_path / "small")
        again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
        torch.testing.assert_close(loaded(**inputs).logits, expected, atol=0, rtol=0)
        torch.testing.assert_close(again(**inputs).logits, expected, atol=0, rtol=0)


REMOTE = """
import sys, torch, transformers
assert "shearling" not in sys.modules
model = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(**inputs).logits, sys.argv[3])
"""


def test_loads_without_shearling(tmp_path: Path) -> None:
    """In a process that cannot import shearling: with trust_remote_code equal logits, without it a loud failure."""
    pruned = shearling.prune(model_of("bert"), batches_of(), flops=0.4)
    pruned.save(tmp_path / "small")
    inputs = inputs_of(batches_of(1, seed=1)[0])
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-I", "-c", "import sys; sys.modules['shearling.pipeline'] = None\n" + REMOTE]
    environment = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "PATH": "/usr/bin:/bin"}
    files = [str(tmp_path / name) for name in ("small", "inputs.pt", "logits.pt")]
    subprocess.run([*command, *files], check=True, env=environment)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), pruned.model(**inputs).logits, atol=0, rtol=0)

    plain = [command[0], "-I", "-c", command[3].replace(", trust_remote_code=True", "")]
    result = subprocess.run([*plain, *files], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "mismatch" in result.stderr.lower() or "Unknown quantization" in result.stderr


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1, 2, 3)])
def test_stock_loading_fails_loudly_even_when_only_whole_sublayers_are_gone(
    empty: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.quantizers import auto

    model = model_of("bert")
    kept = [torch.arange(0 if number in empty else s.units) for number, s in enumerate(structure_of(model).sublayers)]
    shrink(model, kept).save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "shearling")
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_pruning_twice(tmp_path: Path) -> None:
    once = shearling.prune(model_of("bert"), batches_of(), flops=0.7)
    once.save(tmp_path / "once")
    twice = shearling.prune(shearling.load(tmp_path / "once"), batches_of(), flops=0.5)
    twice.save(tmp_path / "twice")
    inputs = inputs_of(batches_of(1)[0])
    with torch.no_grad():
        loaded = shearling.load(tmp_path / "twice")
        torch.testing.assert_close(loaded(**inputs).logits, twice.model(**inputs).logits, atol=0, rtol=0)
