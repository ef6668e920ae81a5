"""Kill every command that writes at random moments, and see that nothing is ever half-written.

    python scripts/kill_test.py --rounds 50

Each round forks a process that works on a tiny model, sends it SIGKILL at a moment drawn from the whole of its run, and
checks what is left: the old output is whole, or the new one is. After the last round of a command it runs to its end,
and nothing hidden is left. Rounds of Ctrl-C must end the process soon, with exit code 130, and leave nothing hidden at
once. Exits with 1 and says which round went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import shearling
import shearling.exporters.exported
import shearling.report.page
import shearling.report.record
import shearling.workflows.export
import shearling.workflows.retrain
import shearling.workflows.source
import shearling.workflows.sweep
from shearling.cli import run

PATIENCE = 5.0  # seconds from Ctrl-C to the end, on a machine that does other things too


def make_model(folder: Path) -> None:
    """A tiny classifier of words."""
    words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(40))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


def make_rows(path: Path) -> None:
    """Labelled rows."""
    draw = random.Random(0)
    rows = [{"text": " ".join(f"w{draw.randrange(40)}" for _ in range(8)), "label": i % 2} for i in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def forked(work: Callable[[], int], log: Path) -> int:
    """The number of a process that does the work and ends with its exit code; what it says goes into a file."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = work()
    except KeyboardInterrupt:  # before the command had begun, or after its end
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Rounds:
    """One folder, worked on and killed in, again and again."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.model, self.rows, self.log = folder / "dense", folder / "rows.jsonl", folder / "log.txt"
        make_model(self.model)
        make_rows(self.rows)
        self.out = {name: folder / name for name in ("small", "sweep", "table.json", "program.pt2", "again", "scored")}
        common = ["--data", str(self.rows), "--task", "classification", "--device", "cpu", "--quiet"]
        points = ["--eval", str(self.rows), "--flops", "0.8,0.6,0.4", "--save"]
        timing = ["--batch-size", "2", "--seq-len", "8", "--budget", "1", "--device", "cpu", "--quiet", "--force"]
        self.commands = {
            "prune": ["prune", self.model, *common, "--flops", "0.5", "--out", self.out["small"], "--force"],
            "sweep": ["sweep", self.model, *common, *points, "--out", self.out["sweep"]],
            "profile": ["profile", self.model, *timing, "--out", self.out["table.json"]],
            "export": ["export", self.out["scored"], "--format", "exported", "--out", self.out["program.pt2"],
                       "--force", "--quiet"],
            "retrain": ["retrain", self.out["scored"], *common, "--epochs", "2", "--out", self.out["again"], "--force"],
            "evaluate": ["evaluate", self.out["scored"], *common, "--record"],
        }  # fmt: skip
        self.checks = {
            "prune": lambda: self.loads(self.out["small"]),
            "sweep": self.check_sweep,
            "profile": lambda: self.out["table.json"].exists() and shearling.load_table(self.out["table.json"]),
            "export": lambda: self.out["program.pt2"].exists() and torch.export.load(self.out["program.pt2"]),
            "retrain": lambda: self.loads(self.out["again"]),
            "evaluate": lambda: self.loads(self.out["scored"]),
        }
        self.lasting: dict[str, float] = {}
        if run([*map(str, self.commands["prune"][:-2]), str(self.out["scored"])]) != 0:
            raise SystemExit("the model that is to be scored cannot be pruned")

    def work(self, kind: str) -> int:
        """One command, from its beginning to its end or to its kill."""
        return run(list(map(str, self.commands[kind])))

    def loads(self, folder: Path) -> None:
        """A checkpoint that can be seen is whole, and so are its record and card."""
        if folder.exists():
            shearling.load(folder)
            if "pruned" not in (folder / "README.md").read_text():
                raise SystemExit(f"the card of {folder} is not whole")

    def check_sweep(self) -> None:
        """Models load, and results tell of no model that is not there."""
        for folder in (self.out["sweep"] / "models").glob("[!.]*"):
            self.loads(folder)
        results = self.out["sweep"] / "results.json"
        for row in json.loads(results.read_text()) if results.exists() else []:
            if "model" in row and not (self.out["sweep"] / row["model"]).is_dir():
                raise SystemExit(f"the sweep tells of {row['model']}, which is not there")

    def whole(self, kind: str) -> float:
        """How long the command takes, in a process of its own, when nobody disturbs it."""
        start = time.perf_counter()
        _, status = os.waitpid(forked(lambda: self.work(kind), self.log), 0)
        if os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"{kind} fails when it is left alone: {self.said()}")
        self.checks[kind]()
        if hidden := self.left_over():
            raise SystemExit(f"{kind} came to its end and left {hidden}")
        return time.perf_counter() - start

    def kill(self, kind: str) -> bool:
        """One round of SIGKILL; whether something hidden was left for the next run to clear."""
        if kind == "sweep" and self.draw.random() < 0.2:
            shutil.rmtree(self.out["sweep"], ignore_errors=True)  # a whole one has nothing left to do
        moment = self.draw.uniform(0, self.lasting[kind])
        child = forked(lambda: self.work(kind), self.log)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        try:
            self.checks[kind]()
        except Exception as error:
            raise SystemExit(f"{kind}, killed after {moment:.2f} s: {error}") from error
        return bool(self.left_over())

    def interrupt(self, kind: str) -> None:
        """One round of Ctrl-C; nothing may be left over either."""
        moment = self.draw.uniform(0.1, 0.9) * self.lasting[kind]
        child = forked(lambda: self.work(kind), self.log)
        time.sleep(moment)
        start = time.perf_counter()
        os.kill(child, signal.SIGINT)
        _, status = os.waitpid(child, 0)
        took, code = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        if code not in (130, 0) or took > PATIENCE:  # 0: it was done already
            raise SystemExit(f"{kind}: Ctrl-C after {moment:.2f} s ended with {code} after {took:.1f} s; {self.said()}")
        if hidden := [path for path in self.left_over() if not path.endswith(".retrain")]:  # one goes on from there
            raise SystemExit(f"{kind}: Ctrl-C after {moment:.2f} s left {hidden}")
        self.checks[kind]()

    def said(self) -> str:
        """The last words of the process."""
        return self.log.read_text()[-1500:]

    def left_over(self) -> list[str]:
        """What a command works in until it is done."""
        return [str(p) for p in self.folder.rglob(".*") if p.suffix in (".part", ".old", ".retrain")]


def main() -> None:
    """Kill, look, and tell how often what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of SIGKILL for every command")
    parser.add_argument("--interrupts", type=int, default=4, help="rounds of Ctrl-C for every command")
    parser.add_argument("--only", help="commands, comma-separated; all unless given")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(Path(folder), options.seed)
        seen = {}
        for kind in options.only.split(",") if options.only else rounds.commands:
            rounds.work(kind)  # here: what it imports is imported once, not in every round
            rounds.lasting[kind] = rounds.whole(kind)
            for _ in range(options.interrupts):
                rounds.interrupt(kind)
            hidden = sum(rounds.kill(kind) for _ in range(options.rounds))
            rounds.whole(kind)
            seen[kind] = {"kills": options.rounds, "hidden": hidden, "seconds": round(rounds.lasting[kind], 2)}
            print(kind, seen[kind], file=sys.stderr, flush=True)
        print(json.dumps(seen))


if __name__ == "__main__":
    main()
