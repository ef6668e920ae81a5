"""q4_0 files of a small trained language model, rounded by its inputs and plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exporters.test_gguf import ENGINES, language_model, tokenizer, uneven
from shearling.exporters import gguf as kind
from shearling.exporters.formats import Job
from shearling.exporters.gguf_run import TorchEngine
from shearling.exporters.rounded_layers import round_layers
from shearling.exporters.rounding import GRIDS
from shearling.workflows.export import export_model

pytest.importorskip("gguf", reason="needs shearling[gguf]")
WORDS = 48


def texts(count: int, seed: int) -> Tensor:
    """[count, 48] tokens: each depends on the two before it, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(9))
    rows = torch.randint(0, WORDS, (count, 48), generator=generator)
    for t in range(2, 48):
        rows[:, t] = table[rows[:, t - 1], (rows[:, t - 2] + torch.randint(0, 2, (count,), generator=generator)) % 4]
    return rows


@pytest.fixture(scope="module")
def trained() -> Any:
    torch.manual_seed(0)
    model = language_model("llama", intermediate_size=128, vocab_size=272)
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.05)
    steps = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        batch = texts(16, 100 + step)
        steps.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        steps.step()
    return model.eval().requires_grad_(False)


def calibration() -> list[dict[str, Tensor]]:
    batch = texts(32, 1)
    return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)}]


def write(model: Any, path: Path, batches: list[dict[str, Tensor]]) -> Path:
    kind.write(Job(model, {}, ["logits"], path, "q4_0", batches, tokenizer=tokenizer(), source="nowhere"))
    return path


def divergence(model: Any, engine: Any) -> float:
    """KL divergence from the model's next tokens to the file's, on texts that the calibration does not hold."""
    found = []
    for row in texts(24, 2):
        wanted = model(input_ids=row[None]).logits[0].log_softmax(-1)
        given = torch.as_tensor(engine.logits(row.tolist())).log_softmax(-1)
        found.append(torch.nn.functional.kl_div(given, wanted, log_target=True, reduction="batchmean"))
    return float(torch.stack(found).mean())


@pytest.mark.slow
def test_a_trained_model_stays_closer_than_by_plain_rounding(trained: Any, tmp_path: Path) -> None:
    plain = divergence(trained, TorchEngine(write(trained, tmp_path / "plain.gguf", [])))
    rounded = divergence(trained, TorchEngine(write(_copy(trained), tmp_path / "rounded.gguf", calibration())))
    assert rounded < 0.7 * plain


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", ["even", "uneven"])
def test_the_file_holds_the_rounded_weights(trained: Any, tmp_path: Path, shape: str, engine: Any) -> None:
    """`write` rounds in place, so that the model afterwards is what the file should give."""
    model = uneven(trained) if shape == "uneven" else _copy(trained)
    file = engine(write(model, tmp_path / "model.gguf", calibration()))
    ids = texts(1, 3)
    expected = model(input_ids=ids).logits[0]
    found = torch.as_tensor(file.logits(ids[0].tolist()))
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
    assert error < 0.03  # the embeddings are in q8_0; llama.cpp rounds activations too


def test_padding_does_not_count(trained: Any) -> None:
    batch = texts(8, 1)
    padded = {"input_ids": torch.cat([batch, batch.flip(1)], 1), "attention_mask": torch.ones(8, 96, dtype=torch.long)}
    padded["attention_mask"][:, 48:] = 0
    with_padding, without = _copy(trained), _copy(trained)
    round_layers(with_padding, [padded], GRIDS["q4_0"])
    round_layers(without, [{"input_ids": batch, "attention_mask": torch.ones_like(batch)}], GRIDS["q4_0"])
    first = [model.model.layers[0].self_attn.q_proj.weight for model in (with_padding, without)]
    torch.testing.assert_close(*first)


def test_export_reports_perplexity_after_each_step(trained: Any, tmp_path: Path) -> None:
    folder, words = tmp_path / "model", tokenizer()
    trained.save_pretrained(folder)
    words.save_pretrained(folder)
    calibrate, rows = ([words.decode(row) for row in texts(24, seed)] for seed in (4, 5))
    found = {}
    for data in (None, calibrate):
        result = export_model(
            str(folder), tmp_path / f"{len(found)}.gguf", format="gguf", precision="q4_0", data=data, eval=rows,
            dense=str(folder), rounds=2,
        )  # fmt: skip
        said = found["plain" if data is None else "rounded"] = result.scores
        assert result.notes
        assert said["metric"] == "perplexity"
        assert said["dense"] == said["pruned"]  # the model itself is named as the dense one
        assert said["exported"] == pytest.approx(said["pruned"], rel=0.2)
    assert found["plain"]["exported"] != found["rounded"]["exported"]


def _copy(model: Any) -> Any:
    other = type(model)(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    return other
