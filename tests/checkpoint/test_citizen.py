"""A pruned checkpoint among other tools: it must behave like any model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shearling
from folders import TEXTS, batches
from tiny import inputs_of


@pytest.fixture
def model(pruned: Path) -> Any:
    return shearling.load(pruned).eval()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return inputs_of(batches()[0])


def test_it_runs_in_a_pipeline(pruned: Path, model: Any) -> None:
    from transformers import AutoTokenizer, pipeline

    classify = pipeline("text-classification", model=str(pruned), device="cpu")
    encoded = AutoTokenizer.from_pretrained(pruned)(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        best = model(**encoded).logits.softmax(-1).max()
    assert classify(TEXTS[0])[0]["score"] == pytest.approx(float(best), abs=1e-5)


def test_it_trains_further(pruned: Path, tmp_path: Path, inputs: dict[str, torch.Tensor]) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    model = AutoModelForSequenceClassification.from_pretrained(pruned)
    with torch.no_grad():
        before = model.eval()(**inputs).logits
    rows = [{**{k: v[i] for k, v in inputs.items()}, "labels": i % 2} for i in range(8)]
    arguments = TrainingArguments(
        str(tmp_path / "runs"), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    with torch.no_grad():
        after = trainer.model.eval()(**inputs).logits
    assert not torch.allclose(before, after)
    trainer.save_model(str(tmp_path / "again"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, after)


def test_saving_it_again_keeps_it_loadable(model: Any, tmp_path: Path, inputs: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModelForSequenceClassification

    model.save_pretrained(tmp_path / "again")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)


def test_adapters_attach(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    with torch.no_grad():
        before = model(**inputs).logits
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value", "intermediate.dense"], r=2)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(**inputs).logits, before)  # an adapter starts as zero
    adapted.train()
    adapted(**inputs, labels=torch.arange(20) % 2).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if "lora_B" in name and p.grad is not None]
    assert trained
    assert any(p.grad.abs().sum() > 0 for n, p in adapted.named_parameters() if n in trained)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(pruned: Path, model: Any, inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    with torch.no_grad():
        full = model(**inputs).logits
        cast = model.to(dtype)(**inputs).logits
        loaded = shearling.load(pruned, dtype=dtype).eval()(**inputs).logits
    assert cast.dtype == loaded.dtype == dtype
    torch.testing.assert_close(cast, loaded)
    torch.testing.assert_close(cast.float(), full, atol=0.1, rtol=0.1)


def test_torch_compile(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # no C++ compiler needed: the graph is the point
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


def test_every_companion_is_there(pruned: Path, dense: Path) -> None:
    assert {p.name for p in dense.iterdir()} <= {p.name for p in pruned.iterdir()}
