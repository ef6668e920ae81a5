from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shearling
from data.tiny import SPECIAL, bert_config, bert_tokenizer, build
from folders import TEXTS, rows_file
from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.cli import run as command
from shearling.evaluation.compare import Comparison, OutputAgreement, agreement_of, choices
from shearling.evaluation.exam import output_reader


def test_two_models_side_by_side(dense: Path, pruned: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.jsonl")
    result = shearling.compare(dense, pruned, data, batch_size=4, device="cpu", progress=False)
    ours, theirs = result.sides
    tokenizer = load_tokenizer(str(dense))
    guesses = []
    for folder in (dense, pruned):  # one text at a time, by hand
        model = load_model(str(folder), device="cpu")
        with torch.no_grad():
            encoded = [tokenizer(text, return_tensors="pt") for text in TEXTS * 2]
            guesses.append([int(model(**inputs).logits.argmax()) for inputs in encoded])
    gold = [number % 2 for number in range(10)]
    same = sum(a == b for a, b in zip(*guesses, strict=True))
    assert result.agreement == OutputAgreement("equal", pytest.approx(100 * same / 10), 10)
    for side, guess in zip(result.sides, guesses, strict=True):
        right = sum(a == b for a, b in zip(guess, gold, strict=True))
        assert side.value == pytest.approx(100 * right / 10)
    assert theirs.params < ours.params
    assert theirs.macs < ours.macs
    assert theirs.bytes == (pruned / "model.safetensors").stat().st_size < ours.bytes
    assert theirs.params == sum(p.numel() for p in shearling.load(pruned).parameters())
    assert ours.milliseconds > 0


def test_models_of_different_vocabularies_are_run_on_their_own_tokens(dense: Path, tmp_path: Path) -> None:
    """Ids of the one are beyond the vocabulary of the other, which knows one type of token only."""
    from tokenizers import Tokenizer
    from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

    state = json.loads(bert_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"] = {word: number for number, word in enumerate([*SPECIAL, "the", "good", "film"])}
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    few = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **names)
    few.save_pretrained(tmp_path / "few")
    config = bert_config(type_vocab_size=1)
    config.vocab_size = 8
    build(BertForSequenceClassification, config).save_pretrained(tmp_path / "few")
    rows = [{"text1": text, "text2": "walking 1 2 3", "label": n % 2} for n, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(*pair: Path) -> Comparison:
        return shearling.compare(*pair, tmp_path / "rows.jsonl", batch_size=2, device="cpu", progress=False)

    mixed = run(dense, tmp_path / "few")
    assert mixed.agreement is None
    for side, folder in zip(mixed.sides, (dense, tmp_path / "few"), strict=True):
        alone = run(folder, folder).sides[0]
        assert (side.value, side.macs, side.batch) == (alone.value, alone.macs, alone.batch)
    assert mixed.sides[0].batch != mixed.sides[1].batch  # the second takes `walking` for one unknown word


def test_the_same_model_twice_agrees_with_itself_without_labels(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows_file(tmp_path / "rows.jsonl", labels=False)
    arguments = ["compare", str(dense), str(dense), "--data", str(data), "--device", "cpu", "--quiet"]
    assert command([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["agreement"] == {"measure": "equal", "value": 100.0, "count": 10}
    assert [side["value"] for side in said["models"]] == [None, None]
    assert said["models"][0]["macs"] == said["models"][1]["macs"] > 0
    assert said["batch"][0] == 10
    assert command(arguments) == 0
    shown = capsys.readouterr().out
    assert "100.00%" in shown
    assert "predictions that are equal, 10 examples" in shown


def test_missing_data_is_wrong_use(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["compare", str(dense), str(dense), "--data", "nowhere.jsonl", "--quiet"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_choices_of_every_head() -> None:
    said = partial(choices, read=output_reader(torch.nn.Identity()))  # type: ignore[arg-type]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"attention_mask": mask}
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    assert said({"logits": logits}, batch).tolist() == [[1], [0]]
    assert said({"logits": logits[:, :1]}, batch).tolist() == [[0.0], [2.0]]
    ends = torch.tensor([[0.0, 1.0, 9.0], [3.0, 1.0, 9.0]])  # the last token of the second is padding
    assert said({"start_logits": ends, "end_logits": -ends}, batch).tolist() == [[2, 0], [0, 1]]
    tokens = torch.eye(3)[None].repeat(2, 1, 1)
    assert said({"logits": tokens}, batch).flatten().tolist() == [0, 1, 2, 0, 1]
    labels = torch.tensor([[-100, 1, -100], [-100, -100, -100]])
    assert said({"logits": tokens}, batch | {"labels": labels}).flatten().tolist() == [1]
    hidden = SimpleNamespace(last_hidden_state=torch.ones(2, 3, 4))
    assert said(vars(hidden), batch).shape == (2, 4)


def test_agreement_of_numbers_and_embeddings() -> None:
    first = torch.tensor([[0.1], [0.2], [0.35], [0.9]])
    assert agreement_of([first], [first * 2 + 1]) == OutputAgreement("spearman", pytest.approx(100), 4)
    turned = torch.eye(3)
    assert agreement_of([turned], [turned * 5]) == OutputAgreement("cosine", pytest.approx(100), 3)
    assert agreement_of([turned], [turned.roll(1, 0)]) == OutputAgreement("cosine", pytest.approx(0), 3)
    assert agreement_of([first], [first[:2]]) is None
    spans = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert agreement_of([spans], [torch.tensor([[1.0, 2.0], [3.0, 5.0]])]) == OutputAgreement("equal", 50, 2)


def test_models_in_memory_and_texts(dense: Path, pruned: Path) -> None:
    tokenizer = load_tokenizer(str(dense))
    models = [load_model(str(folder), device="cpu") for folder in (dense, pruned)]
    result = shearling.compare(*models, TEXTS, tokenizer=tokenizer, progress=False)
    named = shearling.compare(dense, pruned, TEXTS, device="cpu", progress=False)
    assert result.agreement == named.agreement
    assert [side.macs for side in result.sides] == [side.macs for side in named.sides]
    assert [side.value for side in result.sides] == [None, None]
    assert [side.bytes for side in result.sides] == [4 * side.params for side in result.sides]  # float32 in memory
    assert "<div" in result._repr_html_()
    assert "agreement with dense" in str(result)


def test_the_result_of_pruning_beside_its_model(dense: Path, tmp_path: Path) -> None:
    small = shearling.prune(dense, TEXTS * 4, flops=0.5, device="cpu", progress=False)
    result = shearling.compare(dense, small, rows_file(tmp_path / "rows.jsonl"), device="cpu", progress=False)
    assert [side.model for side in result.sides] == [str(dense), "pruned"]
    both = shearling.compare(small.model, small.model, TEXTS, device="cpu", progress=False)
    assert [side.model for side in both.sides] == ["first", "second"]


def test_examples_that_the_two_answer_differently(dense: Path, tmp_path: Path) -> None:
    """The second is the first with its classes exchanged: every answer changes."""
    model = load_model(str(dense), device="cpu")
    turned = load_model(str(dense), device="cpu")
    with torch.no_grad():
        turned.classifier.weight.copy_(model.classifier.weight.flip(0))
        turned.classifier.bias.copy_(model.classifier.bias.flip(0))
    found = shearling.compare(model, turned, rows_file(tmp_path / "rows.jsonl"), progress=False).flipped
    assert found is not None
    assert (found.changed, found.examples) == (10, 10)
    assert found.lost + found.won == 10  # of two classes, one of the two answers is right
    assert [flip.dense == flip.right for flip in found.shown] == [True] * found.lost + [False] * found.won
    unlabelled = shearling.compare(model, turned, TEXTS, progress=False).flipped
    assert unlabelled is not None
    assert (unlabelled.changed, unlabelled.lost) == (len(TEXTS), None)
    assert [flip.text for flip in unlabelled.shown] == list(TEXTS)
    assert all(flip.dense != flip.pruned for flip in unlabelled.shown)
    answers = [labelled.dense for text in TEXTS for labelled in found.shown if labelled.text == text][::2]
    assert answers == [flip.dense for flip in unlabelled.shown]  # in the order of the rows, not of the batches
