"""docs/adding-an-architecture.md, followed to the letter; and the list of architectures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from shearling.cli import run
from shearling.errors import InputError, UnsupportedArchitecture
from shearling.models import table
from shearling.models.refused import EXPERTS, UNSUPPORTED
from shearling.models.row import Row, StackRow
from shearling.models.structure import check_supported, structure_of
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
        "clip siglip wav2vec2 hubert whisper bart t5 gpt2 opt llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 "
        "phi gpt_neox falcon stablelm olmo2 granite smollm3 deberta roformer esm marian mbart pegasus m2m_100 "
        "blenderbot blenderbot-small dinov3_vit siglip2 moonshine"
    )
    for name in wanted.split():
        assert by_name[name]["supported"] is True
        assert by_name[name]["units"] == ["heads", "filters"]
    refused = [entry for entry in entries if not entry["supported"]]
    assert refused
    assert all(entry["note"] and not entry["units"] for entry in refused)
    assert run(["architectures"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in by_name)


def test_the_page_lists_every_architecture() -> None:
    page = (PAGE.parent / "architectures.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w-]+)`", page.partition("## Inputs")[0]))
    assert {name for row in table.ROWS for name in row.model_types} <= listed


def refusal_of(config: Any) -> str:
    """Why a configuration is refused; the relative it names has a row."""
    with pytest.raises(UnsupportedArchitecture) as caught:
        check_supported(config)
    message = str(caught.value)
    assert "docs/adding-an-architecture.md" in message
    nearest = re.search(r"nearest that is supported is '([^']+)'", message)
    assert nearest is not None
    assert any(nearest[1] in row.model_types for row in table.ROWS)
    return message


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_says_why_and_names_the_nearest(name: str) -> None:
    """From the configuration alone; a family that has a row is not in that list too."""
    message = refusal_of(transformers.AutoConfig.for_model(name))
    assert UNSUPPORTED[name].reason in message
    assert UNSUPPORTED[name].kind in message


def test_the_nearest_of_a_variant_of_t5_is_t5() -> None:
    assert "supported is 't5' (encoder-decoder)" in refusal_of(transformers.AutoConfig.for_model("longt5"))


@pytest.mark.parametrize(
    ("name", "kind", "nearest"),
    [
        ("mra", "encoder", "bert"),
        ("nystromformer", "encoder", "bert"),
        ("persimmon", "decoder", "llama"),
        ("led", "encoder-decoder", "bart"),
        ("pvt", "vision", "vit"),
        ("resnet", "vision", "vit"),
        ("blip-2", "vision and language", "gemma3"),
        ("altclip", "image-text towers", "clip"),
        ("sew", "speech", "wav2vec2"),
        ("glm4_moe", "dense", "qwen3"),
        ("qwen3_vl_moe", "dense", "qwen3"),
    ],
)
def test_the_nearest_relative_of_an_unknown_family_is_of_its_kind(name: str, kind: str, nearest: str) -> None:
    assert f"'{nearest}' ({kind})" in refusal_of(transformers.AutoConfig.for_model(name))


def test_experts_are_fused_tensors() -> None:
    """The reason why a mixture of experts is refused: were it to change, rows could be written for them."""
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4, num_key_value_heads=1,
        moe_intermediate_size=4, num_experts=2, num_experts_per_tok=1, vocab_size=9, intermediate_size=8,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config)
    assert any(parameter.dim() == 3 for parameter in model.layers[0].mlp.parameters())
    assert EXPERTS in refusal_of(config)


def test_a_variant_that_a_row_cannot_serve_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="conv_kernel_size=3"):
        structure_of(model_of("deberta-v2", conv_kernel_size=3, conv_act="gelu"))


def test_a_row_needs_something_in_it() -> None:
    with pytest.raises(InputError, match="at least one"):
        table.register(Row(("nothing",), (StackRow("layers", ()),)))
