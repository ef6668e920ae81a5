"""Make the golden checkpoint of this version: what a test of every later version loads.

    python scripts/make_golden.py

Run once for a release and commit what it writes, tests/golden/vX.Y.Z. An existing one is never replaced: checkpoints
that users hold cannot be made again either.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

import shearling

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def main() -> None:
    """One tiny model, pruned so that no layer keeps what it had."""
    folder = GOLDEN / f"v{shearling.__version__}"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=24,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    ids = torch.randint(0, 50, (80, 12))
    pruned = shearling.prune(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], flops=0.4)
    pruned.save(folder)
    with torch.inference_mode():
        logits = pruned.model(input_ids=ids[:3], attention_mask=torch.ones_like(ids[:3])).logits
    expected = {"input_ids": ids[:3].tolist(), "logits": logits.tolist()}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
