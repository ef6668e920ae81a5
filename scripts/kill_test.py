"""Kill prune, save and sweep at random moments, and see that no folder is ever half-written.

    python scripts/kill_test.py --rounds 200

Each round forks a process that works on a tiny model, sends it SIGKILL at a moment drawn from the whole of its run, and
checks what is left: a checkpoint that is absent or loads, a sweep that is absent or goes on. `--interrupt` rounds send
Ctrl-C instead, which must end the process soon, with exit code 130. Exits with 1 and says which round went wrong.
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
import shearling.report.record
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
        self.common = ["--data", str(self.rows), "--task", "classification", "--device", "cpu", "--quiet"]
        self.works = {"prune": self.prune, "save": self.save, "sweep": self.sweep}
        self.lasting: dict[str, float] = {}
        self.seen = {"absent": 0, "complete": 0, "left over": 0}

    def prune(self) -> int:
        """Write over what is there."""
        return run(["prune", str(self.model), *self.common, "--flops", "0.5", "--out", str(self.out), "--force"])

    def sweep(self) -> int:
        """Go on where the last one was killed."""
        points = ["--eval", str(self.rows), "--flops", "0.8,0.6,0.4", "--save"]
        return run(["sweep", str(self.model), *self.common, *points, "--out", str(self.folder / "sweep")])

    def save(self) -> int:
        """Prune once, then write again and again over what is there."""
        pruned = shearling.prune(
            shearling.workflows.source.load_model(str(self.model), device="cpu"),
            [{"input_ids": torch.arange(32).view(4, 8) + 4}],
            flops=0.5,
        )
        for _ in range(20):
            pruned.save(self.out, force=True)
        return 0

    @property
    def out(self) -> Path:
        """Where prune and save write to."""
        return self.folder / "out"

    def whole(self, kind: str) -> float:
        """How long the work takes when nobody disturbs it."""
        if kind not in self.lasting:
            start = time.perf_counter()
            _, status = os.waitpid(forked(self.works[kind], self.log), 0)
            if os.waitstatus_to_exitcode(status) != 0:
                raise SystemExit(f"{kind} fails even when it is left alone")
            self.lasting[kind] = time.perf_counter() - start
            self.check(kind)
            self.clear()
        return self.lasting[kind]

    def kill(self, kind: str) -> None:
        """One round of SIGKILL."""
        moment = self.draw.uniform(0, self.whole(kind))
        child = forked(self.works[kind], self.log)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.check(kind)

    def interrupt(self, kind: str) -> None:
        """One round of Ctrl-C; nothing may be left over either."""
        moment = self.draw.uniform(0.1, 0.9) * self.whole(kind)
        child = forked(self.works[kind], self.log)
        time.sleep(moment)
        start = time.perf_counter()
        os.kill(child, signal.SIGINT)
        _, status = os.waitpid(child, 0)
        took, code = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        if code not in (130, 0) or took > PATIENCE:  # 0: it was done already
            raise SystemExit(f"{kind}: Ctrl-C after {moment:.2f} s ended with {code} after {took:.1f} s; {self.said()}")
        if hidden := self.left_over():
            raise SystemExit(f"{kind}: Ctrl-C after {moment:.2f} s left {hidden}")
        self.check(kind)

    def check(self, kind: str) -> None:
        """What can be seen is complete."""
        self.seen["left over"] += len(self.left_over())
        folders = [self.out, *(self.folder / "sweep" / "models").glob("[!.]*")]
        for folder in folders:
            self.seen["complete" if folder.exists() else "absent"] += 1
            if folder.exists():
                shearling.load(folder)
        if kind == "sweep" and (self.folder / "sweep" / "results.json").exists():
            for row in json.loads((self.folder / "sweep" / "results.json").read_text()):
                if not (self.folder / "sweep" / row["model"]).is_dir():
                    raise SystemExit(f"the sweep tells of {row['model']}, which is not there")

    def said(self) -> str:
        """The last words of the process."""
        return self.log.read_text()[-1500:]

    def left_over(self) -> list[str]:
        """Hidden folders that nobody could tidy up."""
        return [str(p) for p in self.folder.rglob(".*") if p.suffix in (".part", ".old")]

    def finish(self) -> None:
        """A sweep killed so often still comes to its end."""
        _, status = os.waitpid(forked(self.sweep, self.log), 0)
        results = json.loads((self.folder / "sweep" / "results.json").read_text())
        if os.waitstatus_to_exitcode(status) != 0 or len(results) != 3:
            raise SystemExit(f"the sweep does not go on: {len(results)} of 3 points")

    def clear(self) -> None:
        """Begin again with nothing there."""
        for name in ("out", "sweep"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def main() -> None:
    """Kill, look, and tell how often what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of SIGKILL")
    parser.add_argument("--interrupts", type=int, default=12, help="rounds of Ctrl-C")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(Path(folder), options.seed)
        kinds = list(rounds.works)
        for number in range(options.rounds):
            rounds.kill(kinds[number % len(kinds)])
            if number % 7 == 6:
                rounds.clear()  # so that absent folders are killed into as well
        for hidden in rounds.left_over():
            shutil.rmtree(hidden, ignore_errors=True)
        for number in range(options.interrupts):
            rounds.interrupt(("prune", "sweep")[number % 2])
        rounds.finish()
        print(json.dumps({"rounds": options.rounds, "interrupts": options.interrupts, **rounds.seen}))


if __name__ == "__main__":
    main()
