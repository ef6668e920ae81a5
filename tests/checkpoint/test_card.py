from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from shearling.checkpoint.card import carried_over, front_matter, measured, model_card, refreshed
from shearling.checkpoint.load import read_record
from shearling.checkpoint.record import add_evaluation, base_of
from shearling.errors import CheckpointError

SCORE = {"task": "sst2", "metric": "accuracy", "value": 91.25, "examples": 872}


@pytest.fixture
def folder(pruned: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pruned, tmp_path / "mine")


def test_facts_of_the_source_are_carried_over(pruned: Path) -> None:
    facts = front_matter((pruned / "README.md").read_text())
    assert facts["license"] == "mit"
    assert facts["language"] == "en"
    assert facts["datasets"] == ["glue"]
    assert facts["base_model"] == "someone/small-bert"
    assert facts["library_name"] == "transformers"
    assert facts["pipeline_tag"] == "text-classification"
    assert facts["tags"] == ["sentiment", "shearling", "pruned"]


def test_the_body_says_what_the_record_says(pruned: Path) -> None:
    record, text = read_record(pruned), (pruned / "README.md").read_text()
    for depth, (now, before) in enumerate(zip(record["layers"], record["dense_layers"], strict=True)):
        row = f"| {depth} | {now['heads']} of {before['heads']} | {now['filters']} of {before['filters']} |"
        assert row in text
    assert "50% of its FLOPs" in text
    assert "AutoModelForSequenceClassification.from_pretrained" in text
    assert "trust_remote_code=True" in text
    assert "Accuracy was not measured" in text
    assert str(pruned) not in text  # nobody else has this path
    assert "../dense" not in text
    assert text.count("MACs") == 1


def test_the_base_is_found_again_from_the_checkpoint(pruned: Path, dense: Path, tmp_path: Path) -> None:
    assert not Path(read_record(pruned)["base"]).is_absolute()
    assert Path(str(base_of(pruned))).resolve() == dense.resolve()
    assert base_of(dense) is None
    away = shutil.copytree(pruned, tmp_path / "deep" / "er" / "away")
    assert base_of(away) is None


def test_a_score_goes_into_record_and_card(folder: Path) -> None:
    add_evaluation(folder, SCORE | {"value": 12.0})
    add_evaluation(folder, SCORE | {"dense": 92.5})
    record = read_record(folder)
    assert record["evaluations"] == [SCORE | {"dense": 92.5}]
    text = (folder / "README.md").read_text()
    assert "| accuracy, sst2 | 92.50 | **91.25** | -1.25 | 872 examples, 95% interval 89.2 to 92.9 |" in text
    assert "not measured" not in text
    results = front_matter(text)["model-index"][0]["results"]
    assert results[0]["metrics"] == [{"type": "accuracy", "value": 91.25}]


def test_words_of_the_owner_survive_a_score(folder: Path) -> None:
    card = folder / "README.md"
    card.write_text(card.read_text() + "\nMy own words.\n")
    add_evaluation(folder, SCORE)
    text = card.read_text()
    assert text.endswith("\nMy own words.\n")
    assert "**91.25**" in text


def test_a_card_without_marks_is_left_alone(pruned: Path) -> None:
    record = read_record(pruned)
    assert refreshed("# All mine\n", record, record | {"evaluations": [SCORE]}) == "# All mine\n"


def test_a_dense_directory_has_no_record_to_write_to(dense: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no shearling\.json"):
        add_evaluation(dense, SCORE)


@pytest.mark.parametrize(
    "text", ["", "# No front matter", "---\n: : :\n---", "---\nnever closed", "---\n- a list\n---"]
)
def test_front_matter_that_is_none(text: str) -> None:
    assert front_matter(text) == {}


def test_one_tag_given_as_a_word() -> None:
    assert carried_over({"tags": "bert"}, "BertModel")["tags"] == ["bert", "shearling", "pruned"]


def test_the_front_matter_is_yaml_whatever_the_facts_hold(pruned: Path) -> None:
    record = read_record(pruned)
    record["card"] |= {"license_name": "a: b # c", "language": ["no", "日本語"]}
    facts = yaml.safe_load(model_card(record).split("---")[1])
    assert facts["license_name"] == "a: b # c"
    assert facts["language"] == ["no", "日本語"]


def test_latency_and_exact_match_are_shown(pruned: Path) -> None:
    record = json.loads(json.dumps(read_record(pruned)))
    record |= {"latency": {"measured": 0.51, "predicted": 0.5, "device": "a CPU"}}
    record["evaluations"] = [{"task": "squad", "metric": "f1", "value": 80.0, "em": 70.0, "examples": 10}]
    assert "| latency, a CPU | 1 | **0.510** | 1.96x faster | predicted 0.500 |" in measured(record)
    assert "exact match 70.00" in measured(record)
