"""A model whose class comes with it, as code: pruned, saved with that code, and loaded like the dense one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import shearling
from folders import batches, rows_file
from shearling.checkpoint.pretrained import load_model
from shearling.cli import run
from shearling.errors import CheckpointError, ModelError
from warm import python

AUTO = "AutoModelForSequenceClassification"
NAME = "HouseForSequenceClassification"
CLASS = f"""
import torch
from transformers import BertModel, BertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from .house_parts import HouseConfig, halved


class {NAME}(BertPreTrainedModel):
    config_class = HouseConfig

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.classifier(halved(states.mean(dim=1)))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
"""
PARTS = "{config}\n\n\ndef halved(value):\n    return value / 2\n"
CONFIGS = {
    "config of transformers": "from transformers import BertConfig as HouseConfig",
    "config of its own": "from transformers import BertConfig\n\n\nclass HouseConfig(BertConfig):\n    pass",
}
TOKENIZER = "from transformers import BertTokenizer\n\n\nclass HouseTokenizer(BertTokenizer):\n    pass\n"
ALONE = """
import sys
assert "shearling" not in sys.modules
sys.modules["shearling"] = None  # it cannot be imported
import torch, transformers
for folder in sys.argv[2:]:
    try:
        transformers.AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)
        sys.exit("loaded without its code")
    except (OSError, ValueError) as error:
        assert "trust_remote_code=True" in str(error), error
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    batch = torch.load(sys.argv[1])
    torch.save(model(**batch).logits, folder + "/logits.pt")
    model.save_pretrained(folder + "/again")
"""


@pytest.fixture(scope="module")
def cuts(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny classifier with a class of its own, or a class and a configuration, pruned by the command."""
    return {kind: pruned_house(dense, tmp_path_factory.mktemp("house"), kind) for kind in CONFIGS}


@pytest.fixture(params=CONFIGS)
def cut(cuts: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return cuts[request.param]


def pruned_house(dense: Path, place: Path, kind: str) -> Path:
    folder = Path(shutil.copytree(dense, place / "dense"))
    (folder / "house.py").write_text(CLASS)
    (folder / "house_parts.py").write_text(PARTS.format(config=CONFIGS[kind]))
    own = {"AutoConfig": "house_parts.HouseConfig"} if kind == "config of its own" else {}
    change(folder / "config.json", architectures=[NAME], auto_map={AUTO: f"house.{NAME}", **own})
    command = ["prune", str(folder), "--data", str(rows_file(place / "rows.jsonl")), "--flops", "0.5"]
    assert run([*command, "--device", "cpu", "--quiet", "--trust-remote-code", "--out", str(place / "cut")]) == 0
    return place / "cut"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def inputs() -> dict[str, torch.Tensor]:
    return {name: value for name, value in batches()[0].items() if name != "labels"}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(**inputs()).logits
    return found


def test_it_loads_and_is_saved_again(cut: Path, tmp_path: Path) -> None:
    model = shearling.load(cut, trust_remote_code=True)
    assert type(model).__name__ == NAME
    dense = load_model(str(cut.parent / "dense"), device="cpu", trust_remote_code=True)
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in dense.parameters())
    auto = AutoModelForSequenceClassification.from_pretrained(cut, trust_remote_code=True)
    torch.testing.assert_close(logits(auto), logits(model))
    auto.save_pretrained(tmp_path / "again")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again", trust_remote_code=True)
    torch.testing.assert_close(logits(again), logits(model))


def test_it_loads_where_shearling_is_not_installed(cuts: dict[str, Path], tmp_path: Path) -> None:
    """And is saved again there; without trust it does not load at all. One process for both kinds."""
    torch.save(inputs(), tmp_path / "batch.pt")
    done = python(ALONE, str(tmp_path / "batch.pt"), *map(str, cuts.values()))
    assert done.returncode == 0, done.stderr
    for folder in cuts.values():
        expected = logits(shearling.load(folder, trust_remote_code=True))
        torch.testing.assert_close(torch.load(folder / "logits.pt"), expected)
        again = AutoModelForSequenceClassification.from_pretrained(folder / "again", trust_remote_code=True)
        torch.testing.assert_close(logits(again), expected)


def test_it_does_not_load_untrusted(cut: Path) -> None:
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        shearling.load(cut)
    with pytest.raises((OSError, ValueError), match="trust_remote_code=True"):
        AutoModelForSequenceClassification.from_pretrained(cut, trust_remote_code=False)


def test_a_class_of_transformers_of_the_same_name_does_not_take_its_place(cut: Path, tmp_path: Path) -> None:
    """The weights may fit both classes; only one computes what was pruned."""
    folder = Path(shutil.copytree(cut, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    shapes = config["shearling"] | {"auto_map": {AUTO: "house.BertForSequenceClassification"}}
    change(folder / "config.json", architectures=["BertForSequenceClassification"], shearling=shapes)
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        shearling.load(folder)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_model(str(folder), device="cpu")


def test_the_code_and_what_is_said_of_it(cut: Path) -> None:
    assert {"house.py", "house_parts.py", "modeling_shearling.py"} <= {path.name for path in cut.iterdir()}
    record = json.loads((cut / "shearling.json").read_text())
    assert record["auto_class"] == AUTO
    assert any("custom code of the model was run" in warning for warning in record["warnings"])
    card = (cut / "README.md").read_text()
    assert "runs that code" in card
    assert "import shearling" not in card


def test_every_command_takes_it_again(cut: Path, tmp_path: Path) -> None:
    rows = str(rows_file(tmp_path / "rows.jsonl"))
    trusted = ["--trust-remote-code", "--quiet"]
    assert run(["evaluate", str(cut), "--data", rows, "--device", "cpu", *trusted]) == 0
    twice = ["prune", str(cut), "--data", rows, "--flops", "0.5", "--device", "cpu", "--out", str(tmp_path / "twice")]
    assert run([*twice, *trusted]) == 0
    trained = [
        "retrain",
        str(cut),
        "--data",
        rows,
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "trained"),
    ]
    assert run([*trained, *trusted]) == 0
    for place in ("twice", "trained"):
        assert type(shearling.load(tmp_path / place, trust_remote_code=True)).__name__ == NAME


def test_references_of_a_class_that_was_not_used_are_left_behind(dense: Path, tmp_path: Path) -> None:
    """A model that transformers has by now often still names the code it once came with."""
    folder = Path(shutil.copytree(dense, tmp_path / "model"))
    (folder / "house.py").write_text(CLASS)
    change(folder / "config.json", auto_map={AUTO: "house.BertForSequenceClassification", "AutoConfig": "house.Config"})
    out = shearling.prune(load_model(str(folder), device="cpu"), batches(), flops=0.5).save(tmp_path / "out")
    named = json.loads((out / "config.json").read_text())["auto_map"]
    assert {place.partition(".")[0] for place in named.values()} == {"modeling_shearling"}
    assert not (out / "house.py").exists()


def test_a_tokenizer_that_comes_with_the_model(dense: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "model"))
    (folder / "house_words.py").write_text(TOKENIZER)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["house_words.HouseTokenizer", None]})
    out = shearling.prune(load_model(str(folder), device="cpu"), batches(), flops=0.5).save(tmp_path / "out")
    assert type(AutoTokenizer.from_pretrained(out, trust_remote_code=True)).__name__ == "HouseTokenizer"
