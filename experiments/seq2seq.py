"""An encoder-decoder before and after pruning: how many next tokens stay as they were.

    python experiments/seq2seq.py --tokenizer DIR --data DIR --device cuda --minutes 1.5

The shapes are flan-t5-small's (8 + 8 layers, width 512, 6 heads of 64, gated FFNs of 1,024). No such checkpoint is at
hand, so one is trained first, for `--minutes`: it restores sentences whose words are in part missing, replaced and out
of order, as BART was trained. Then it is pruned with 512 other sentences, and scored on 512 more: the share of next
tokens equal to the dense model's, perplexity and ROUGE-L of what it writes. `--data` holds wikitext2.valid.* and
sst2.train.* as in ../shared, `--tokenizer` any directory with one that has a padding token.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import shearling
from shearling.data import read_rows

BUDGETS = (0.9, 0.8, 0.7, 0.5)
SAMPLES = 512
LENGTH = 64  # tokens at most
SHAPES = {
    "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "seq2seq.json"
Row = dict[str, Any]


def sentences(data: Path) -> list[str]:
    """Of WikiText-2 and of film reviews, shuffled."""
    wiki = [text for path in sorted(data.glob("wikitext2.valid.*")) for text in read_rows(path).column("text")]
    split = [part.strip() for text in wiki for part in re.split(r"(?<= [.?!]) ", text)]
    reviews = [
        text.strip() for path in sorted(data.glob("sst2.train.*")) for text in read_rows(path).column("sentence")
    ]
    chosen = [text for text in dict.fromkeys([*split, *reviews]) if 6 <= len(text.split()) <= 40]
    random.Random(0).shuffle(chosen)
    return chosen


def spoilt(text: str, rng: random.Random, words: Sequence[str]) -> str:
    """A tenth of the words missing, a tenth replaced, and neighbours swapped."""
    found = [rng.choice(words) if rng.random() < 0.1 else word for word in text.split() if rng.random() > 0.1]
    for i in range(len(found) - 1):
        if rng.random() < 0.1:
            found[i], found[i + 1] = found[i + 1], found[i]
    return " ".join(found)


def pairs(texts: Sequence[str], seed: int) -> list[Row]:
    """Rows of a spoilt source and the target that it came from."""
    rng = random.Random(seed)
    words = [word for text in texts[:500] for word in text.split()]
    return [{"source": spoilt(text, rng, words), "target": text} for text in texts]


def trained(tokenizer: Any, texts: Sequence[str], device: str, minutes: float, batch: int = 256) -> Any:
    """A model that restores sentences; it ends with the clock, the rate falls with it."""
    torch.manual_seed(0)
    end = tokenizer.eos_token_id or tokenizer.sep_token_id
    config = T5Config(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=end,
        decoder_start_token_id=tokenizer.pad_token_id, dropout_rate=0.0, **SHAPES,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).to(device).train()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.05)  # logits of about 1 to begin with
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began, seed, step, loss = time.monotonic(), 0, 0, torch.zeros(())

    def done() -> float:
        return (time.monotonic() - began) / (60 * minutes)

    while done() < 1:
        seed += 1
        rows = pairs(random.Random(seed).sample(texts, len(texts)), seed)
        for at in range(0, len(rows), batch):
            step += 1
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * min(step / 200, max(0.0, 1 - done()) + 0.02)
            chosen = rows[at : at + batch]
            source, target = (
                tokenizer([row[name] for row in chosen], max_length=LENGTH, truncation=True, padding=True,
                          return_tensors="pt").to(device)
                for name in ("source", "target")
            )  # fmt: skip
            labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                loss = model(input_ids=source["input_ids"], attention_mask=source["attention_mask"], labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            if done() >= 1:
                break
    print(f"trained for {step} steps, loss {float(loss.detach()):.3f}", flush=True)
    return model.eval()


def scored(model: Any, tokenizer: Any, sample: list[Row], exam: list[Row], budgets: Sequence[float]) -> list[Row]:
    """A row for every budget, from calls of `shearling.prune` as users make them."""
    rows = []
    common: Row = {"tokenizer": tokenizer, "task": "seq2seq", "max_length": LENGTH, "progress": False}
    for flops in budgets:
        row: Row = {"flops": flops, "samples": len(sample)}
        pruned = shearling.prune(
            model, sample, flops=flops, samples=len(sample), eval=exam, metric="agreement", timing=False, **common
        )
        row["agreement"] = pruned.report.evaluation["pruned"]
        for metric in ("perplexity", "rouge-l"):
            for name, of in (("dense", model), ("pruned", pruned.model)):
                limit = 128 if metric == "rouge-l" else None
                row[f"{metric}, {name}"] = shearling.evaluate(of, exam, metric=metric, limit=limit, **common).value
        row |= {"polish": pruned.report.polish, "seconds": round(sum(pruned.report.seconds.values()), 2)}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=1.5, help="of training")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    texts = sentences(options.data)
    apart = 2 * options.samples
    model = trained(tokenizer, texts[apart:], options.device, options.minutes)
    sample, exam = (pairs(texts[i * options.samples : (i + 1) * options.samples], -1 - i) for i in (0, 1))
    rows = scored(model, tokenizer, sample, exam, [float(word) for word in options.budgets.split(",")])
    options.out.write_text(json.dumps({"minutes": options.minutes, "texts": len(texts), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
