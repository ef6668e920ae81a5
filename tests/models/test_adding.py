"""docs/adding-an-architecture.md, followed to the letter; and the list of architectures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shearling.cli import run
from shearling.errors import InputError, UnsupportedArchitecture
from shearling.models import table
from shearling.models.row import Row, StackRow
from shearling.models.structure import row_of, structure_of
from tiny import model_of

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-architecture.md"


def test_the_page_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(table, "ROWS", table.ROWS)  # put back afterwards
    before = list(table.ROWS)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 4
    namespace: dict[str, Any] = {"__name__": "page"}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), namespace)
    finally:
        table.ROWS[:] = before
    shown = re.search(r"print\(structure.sizes\)  # (.*)", "\n".join(blocks))
    assert shown is not None
    assert shown[1] in capsys.readouterr().out


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["architectures", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["architectures"]
    by_name = {entry["model_type"]: entry for entry in entries}
    assert len(by_name) == len(entries)
    wanted = (
        "bert roberta xlm-roberta camembert electra distilbert mpnet deberta-v2 albert modernbert vit deit beit dinov2 "
        "clip siglip wav2vec2 hubert whisper bart t5 gpt2 opt llama mistral qwen2 qwen3 gemma"
    )
    for name in wanted.split():
        assert by_name[name]["supported"] is True
        assert by_name[name]["units"] == ["heads", "filters"]
    refused = [entry for entry in entries if not entry["supported"]]
    assert refused
    assert all(entry["note"] and not entry["units"] for entry in refused)
    assert run(["architectures"]) == 0
    shown = capsys.readouterr().err
    assert all(name in shown for name in by_name)


@pytest.mark.parametrize("name", table.UNSUPPORTED)
def test_what_is_not_supported_says_why_and_names_the_nearest(name: str) -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        row_of(name)
    message = str(caught.value)
    assert table.UNSUPPORTED[name] in message
    assert "docs/adding-an-architecture.md" in message
    nearest = re.search(r"nearest that is supported is '([^']+)'", message)
    assert nearest is not None
    assert row_of(nearest[1])


def test_a_variant_that_a_row_cannot_serve_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="conv_kernel_size=3"):
        structure_of(model_of("deberta-v2", conv_kernel_size=3, conv_act="gelu"))


def test_a_row_needs_something_in_it() -> None:
    with pytest.raises(InputError, match="at least one"):
        table.register(Row(("nothing",), (StackRow("layers", ()),)))
