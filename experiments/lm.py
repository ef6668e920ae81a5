"""Language models, every method under one rule: the same tokens, the same budget, the same scores.

    python experiments/lm.py pack --model SmolLM2-135M.gguf --data DIR --name SmolLM2-135M --pack PACK
    python experiments/lm.py run --pack PACK --out results/lm.jsonl --device cuda --minutes 10
    python experiments/lm.py show results/lm.jsonl

Calibration: 128 windows of 1,024 tokens from WikiText-2's valid part; with `--calibration squad`, as many as there are
of paragraphs of SQuAD 2.0's training part, which turns the domains around. Scores: perplexity at windows of 1,024
tokens on WikiText-2's test part and on paragraphs of SQuAD 2.0's dev part; percent right where the model has to tell
the answer to a question from three other answers of the same paragraph, by likelihood. Budget: the share of the
parameters of the layers' attention and FFN that stays. Nothing is retrained.

`pack` needs the tokenizer and the GGUF reader, `run` needs neither. Every finished point is a line of the results;
a second run goes on where the first stopped. Methods: surgeon, paper, those of `rivals/`, and variants of surgeon with
their options behind a colon, such as `surgeon:rounds=2` (see `lm_variants.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from lm_exam import scores
from lm_pack import pack, unpack
from lm_variants import variant_of
from rivals import RIVALS, Subject
from rivals.subject import Unsuited

SHARES = (0.8, 0.7, 0.9, 0.5)  # the most telling first
METHODS = (
    "surgeon",
    "flap",
    "replaceme",
    "shortgpt",
    "wanda-sp",
    "taylor",
    "paper",
    "slicegpt",
    "magnitude",
    "surgeon+polish",
)

Row = dict[str, Any]


def run(options: argparse.Namespace) -> None:
    """Prune and score, point by point, until the time is up."""
    deadline = time.monotonic() + 60 * options.minutes
    model, tokens, facts = unpack(options.pack)
    name = "calibration_squad" if options.calibration == "squad" else "calibration"
    calibration = torch.from_numpy(tokens[name][: options.windows, : options.length]).long()
    subject = Subject(model.to(options.device), calibration)
    base = {"model": facts["name"], "windows": calibration.shape[0], "length": calibration.shape[1]}
    if options.limit is not None:
        base["limit"] = options.limit
    if options.calibration != "wikitext2":
        base["model"] += f", calibrated on {options.calibration}"
    done = {_key(row) for row in read(options.out)}
    shares = [float(share) for share in options.shares.split(",")]
    points = [("dense", 1.0), *((method, share) for method in options.methods.split() for share in shares)]
    at_work = ""
    for method, share in points:
        row = base | {"method": method, "share": share}
        if _key(row) in done:
            continue
        if time.monotonic() > deadline:
            print(f"out of time before {method} at {share:g}; the same command goes on from here")
            break
        if (group := method.partition(":")[0] + ":" * (":" in method)) != at_work:
            subject.measured.clear()  # every method pays for its own measurements; variants share theirs
            at_work = group
        keep(options.out, row | point(subject, tokens, method, share, options.limit))
    show(options)


def point(subject: Subject, tokens: Any, method: str, share: float, limit: int | None) -> Row:
    """One pruned model with its scores; a method that does not suit the model says why."""
    _forget_peak(subject.device)
    began = time.perf_counter()
    try:
        student = subject.model if method == "dense" else pruned(subject, method, share)
    except Unsuited as reason:
        return {"note": str(reason)}
    except RuntimeError as error:  # such as running out of memory: the other points are still worth having
        return {"note": f"failed: {str(error).splitlines()[0]}"}
    _wait(subject.device)
    seconds = time.perf_counter() - began
    peak = _peak(subject.device)
    began = time.perf_counter()
    row = scores(student, tokens, limit)
    return {
        "kept": round(kept_share(student, subject), 5),
        **{name: round(value, 4) for name, value in row.items()},
        "seconds": round(seconds, 2),
        "peak_gb": round(peak, 2),
        "scoring_seconds": round(time.perf_counter() - began, 2),
    }


def pruned(subject: Subject, method: str, share: float) -> Any:
    """The model that a method makes of the dense one."""
    make = RIVALS.get(method) or variant_of(method)
    return make(subject, share)


def kept_share(student: Any, subject: Subject) -> float:
    """Of the parameters of the projections in the layers; a model that stands in for a smaller one says it itself."""
    if hasattr(student, "kept_share"):
        return float(student.kept_share)
    return _layer_parameters(student, subject) / _layer_parameters(subject.model, subject)


def _layer_parameters(model: Any, subject: Subject) -> int:
    """Weights and biases of the projections in the layers; norms are no method's matter."""
    pile = model.base_model.get_submodule(subject.structure.stacks[0].row.layers)
    return sum(p.numel() for module in pile.modules() if _is_projection(module) for p in module.parameters(False))


def _is_projection(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2


def show(options: argparse.Namespace) -> None:
    """A table per model: methods down, shares across, both domains and the choice task."""
    rows = [row for row in read(options.out) if "wikitext2" in row]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        print(f"\n{model}: perplexity on WikiText-2 / on SQuAD, percent of choices right\n")
        print(table(mine))


def table(rows: list[Row]) -> str:
    """As markdown; the seconds and gigabytes are the most of all shares, so the measurement is in them."""
    shares = sorted({row["share"] for row in rows if row["method"] != "dense"}, reverse=True)
    found = {(row["method"], row["share"]): row for row in rows}
    cells = [["method", *(f"{100 * share:g}%" for share in shares), "seconds", "peak GB"]]
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        across = [(method, 1.0 if method == "dense" else share) for share in shares]
        line = [_cell(found.get(key)) for key in across] if method != "dense" else [_cell(mine[0])] * len(shares)
        cells.append([
            method, *line, f"{max(row['seconds'] for row in mine):.1f}", f"{max(row['peak_gb'] for row in mine):.1f}",
        ])  # fmt: skip
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])


def _cell(row: Row | None) -> str:
    return "-" if row is None else f"{row['wikitext2']:.2f} / {row['squad']:.2f}, {row['choice']:.1f}"


def read(path: Path) -> list[Row]:
    """The points so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def keep(path: Path, row: Row) -> None:
    """Add a point, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("model", "windows", "length", "limit", "method", "share"))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float:
    """Gigabytes at most since it was forgotten; on a CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def pack_model(options: argparse.Namespace) -> None:
    """Write the folder that `run` reads."""
    from shearling.checkpoint.pretrained import load_model, load_tokenizer

    model = load_model(options.model, device="cpu", dtype="float32")
    pack(model, load_tokenizer(options.model), options.data, options.pack, options.name)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune language models with every method, under one rule.")
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="a model and its texts as a folder")
    packing.add_argument("--model", required=True, help="a model directory, or a .gguf file")
    packing.add_argument("--data", type=Path, required=True, help="folder with wikitext2.*.txt.xz, squad_v2.*.jsonl.xz")
    packing.add_argument("--name", required=True, help="what tables call the model")
    packing.add_argument("--pack", type=Path, required=True)
    packing.set_defaults(command=pack_model)
    running = commands.add_parser("run", help="prune and score, point by point")
    running.add_argument("--pack", type=Path, required=True)
    running.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lm.jsonl")
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--minutes", type=float, default=10, help="no point begins after this time")
    running.add_argument("--methods", default=" ".join(METHODS), help="separated by spaces")
    running.add_argument("--shares", default=",".join(f"{share:g}" for share in SHARES))
    running.add_argument("--calibration", default="wikitext2", choices=("wikitext2", "squad"), help="texts to prune by")
    running.add_argument("--windows", type=int, default=128, help="of calibration (to try things out: fewer)")
    running.add_argument("--length", type=int, default=1024, help="tokens of a window of calibration")
    running.add_argument("--limit", type=int, help="score on the first so many windows and items only")
    running.set_defaults(command=run)
    showing = commands.add_parser("show", help="tables of results")
    showing.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent / "results" / "lm.jsonl")
    showing.set_defaults(command=show)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    options.command(options)
