"""Run with the installed wheel in a clean environment: prune a tiny model, save it, load it, and compare."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import shearling


def main() -> None:
    """Exit with a message at the first thing that is not as it should be."""
    home = Path(shearling.__file__).resolve().parent
    expect("site-packages" in home.parts, f"shearling comes from {home}, not from the wheel")
    expect(importlib.metadata.version("shearling") == shearling.__version__, "the version is written in two places")
    files = importlib.resources.files("shearling")
    for name in ("py.typed", "models/modeling_shearling.py", "report/templates/page.html"):
        expect(files.joinpath(name).is_file(), f"the wheel lacks {name}")
    for name in ("datasets", "sklearn", "onnx", "accelerate"):
        expect(importlib.util.find_spec(name) is None, f"{name} is installed: this environment is not clean")

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertForSequenceClassification(config).eval()
    batches = [{"input_ids": torch.randint(5, 50, (16, 10))} for _ in range(8)]
    for method in ("surgeon", "paper"):
        pruned = shearling.prune(model, batches, flops=0.5, method=method)
        expect(pruned.report.flops.ratio <= 0.5, f"{method} is over budget")
        with tempfile.TemporaryDirectory() as folder:
            pruned.save(Path(folder) / "half")
            again = shearling.load(Path(folder) / "half")
            plain = transformers.AutoModelForSequenceClassification.from_pretrained(Path(folder) / "half")
        with torch.no_grad():
            logits = [m.eval()(**batches[0]).logits for m in (pruned.model, again, plain)]
        expect(all(torch.equal(logits[0], other) for other in logits[1:]), f"{method}: loaded models differ")
    print(f"shearling {shearling.__version__} from the wheel prunes, saves and loads")


def expect(true: bool, otherwise: str) -> None:
    """Stop here unless it is true."""
    if not true:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
