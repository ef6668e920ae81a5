"""The language-model harness on tiny random models: packing, scoring, and every rival within its budget."""

from __future__ import annotations

import copy
import json
import lzma
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import lm
import lm_exam
import lm_pack
from lm_variants import variant_of
from rivals import RIVALS, Subject
from rivals.subject import Unsuited, uniform_counts, unit_sums

from families import slow
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of

pytestmark = pytest.mark.slow  # the harness is not the product: its tests wait for the slow checks

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


OURS = (
    "surgeon", "surgeon+polish", "paper", "surgeon:rounds=2,polish=2", "surgeon:ridge=0.001,realign=0",
    "surgeon:polish=2,own=0,blend=0.5",
)  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return _lively(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)))


def gemma() -> Any:
    torch.manual_seed(0)
    return _lively(Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8, query_pre_attn_scalar=8)))


def _lively(model: Any) -> Any:
    """Weights large enough that layers do something."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.2)
    return model.eval()


def subject_of(model: Any) -> Subject:
    generator = torch.Generator().manual_seed(1)
    return Subject(model, torch.randint(0, 64, (24, 16), generator=generator))


def tokens_of(items: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 14, 4 * items)
    return {
        "wikitext2": rng.integers(0, 64, (5, 16)),
        "squad": rng.integers(0, 64, (3, 16)),
        "choice_tokens": rng.integers(0, 64, lengths.sum()),
        "choice_length": lengths,
        "choice_answer": rng.integers(1, 4, 4 * items),
        "choice_right": rng.integers(0, 4, items),
    }


@pytest.mark.parametrize("make", [llama, gemma])
def test_a_packed_model_comes_back(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_pack, "CHUNK", 5000)
    monkeypatch.setattr(lm_pack, "texts", lambda tokenizer, data, bos: {"calibration": np.arange(4)})
    model = make()
    lm_pack.pack(model, type("Tokenizer", (), {"bos_token_id": 2}), tmp_path, tmp_path / "pack", "tiny")
    again, tokens, facts = lm_pack.unpack(tmp_path / "pack")

    assert len(list((tmp_path / "pack").glob("weights-*.bin"))) > 3
    assert tokens["calibration"].tolist() == [0, 1, 2, 3]
    assert facts["bos"] == (2 if make is gemma else None)
    for name, value in model.state_dict().items():
        assert (again.state_dict()[name] - value).abs().max() <= 0.005 * value.abs().max(), name


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    lm_pack.write_weights(llama(), tmp_path)
    entry = {"name": "x", "shape": [2, 32], "coding": "float", "parts": [["<f4", [2, 32]]]}
    with pytest.raises(SystemExit, match=r"carry all weights"):
        list(lm_pack.read_weights(tmp_path, [entry]))


def test_weights_of_a_quantised_file_are_kept_exactly() -> None:
    rng = np.random.default_rng(0)
    step, least = (rng.uniform(0.01, 0.02, (64, 1)).astype(np.float16).astype(np.float32) for _ in range(2))
    codes = rng.integers(0, 16, (64, 32))
    codes[:, 0], codes[:, 1] = 0, 15  # a quantiser uses the whole range of a block
    values = (codes * step - least).astype(np.float32).reshape(32, 64)
    coded, arrays = lm_pack.encode("w", values)

    assert coded.coding == "affine4"
    assert sum(array.nbytes for array in arrays) * 8 == 5 * values.size
    np.testing.assert_allclose(lm_pack._decode("affine4", arrays).reshape(32, 64), values, atol=1e-5)


def test_texts_become_windows_and_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is a character here; a paragraph with four answers gives a choice for every question."""
    monkeypatch.setattr(lm_pack, "WINDOW", 10)
    answers = ["ab", "cd", "ef", "gh"]
    rows = [{"context": "ab cd ef gh", "question": f"q{a}?", "answers": [{"text": a}]} for a in answers]
    rows.append({"context": "few", "question": "?", "answers": [{"text": "few"}]})
    rows.append({"context": "none", "question": "?", "answers": []})
    for part in ("dev", "train"):
        with lzma.open(tmp_path / f"squad_v2.{part}.jsonl.xz", "wt") as file:
            file.write("\n".join(map(json.dumps, rows if part == "dev" else rows[:1])))
    for part, count in (("valid", 25), ("test", 19)):
        with lzma.open(tmp_path / f"wikitext2.{part}.txt.xz", "wt") as file:
            file.write("x" * count)
    found = lm_pack.texts(lambda text, **options: {"input_ids": [ord(c) for c in text]}, tmp_path, 2)

    assert [found[name].shape for name in ("calibration", "wikitext2", "squad")] == [(2, 10), (2, 10), (2, 10)]
    assert found["squad"][0].tolist() == [2, *map(ord, "ab cd ef ")]
    assert len(found["choice_right"]) == 4
    start = 0
    for number, length in enumerate(found["choice_length"]):
        text = "".join(map(chr, found["choice_tokens"][start + 1 : start + length]))
        start += length
        prompt, answer = text[: -found["choice_answer"][number]], text[-found["choice_answer"][number] :].strip()
        assert prompt.startswith("ab cd ef gh\n\nQuestion: q")
        item, place = divmod(number, 4)
        assert (f"q{answer}?" in prompt) == (found["choice_right"][item] == place)
    assert start == len(found["choice_tokens"])


def test_perplexity_is_that_of_the_model_s_own_loss() -> None:
    model, tokens = llama(), tokens_of()
    ids = torch.from_numpy(tokens["wikitext2"])
    with torch.inference_mode():
        loss = float(model(input_ids=ids, labels=ids).loss)
        assert lm_exam.perplexity(model, tokens["wikitext2"]) == pytest.approx(math.exp(loss), rel=1e-4)


def test_choices_are_scored_as_if_one_by_one() -> None:
    model, tokens = llama(), tokens_of()
    right, start, found = 0, 0, []
    for number, length in enumerate(tokens["choice_length"]):
        ids = torch.from_numpy(tokens["choice_tokens"][start : start + length])
        start += length
        answer = int(tokens["choice_answer"][number])
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        score = sum(float(logits[at - 1, ids[at]]) for at in range(length - answer, length))
        found.append(score)
    for item, correct in enumerate(tokens["choice_right"]):
        right += int(np.argmax(found[4 * item : 4 * item + 4]) == correct)
    with torch.inference_mode():
        assert lm_exam.choice_accuracy(model, tokens) == pytest.approx(100 * right / 6)


@pytest.mark.parametrize("share", [slow(0.9), 0.7, slow(0.5)])
@pytest.mark.parametrize("method", sorted(RIVALS))
@pytest.mark.parametrize("make", [llama, slow(gemma)])
def test_every_rival_stays_within_its_budget(make: Any, method: str, share: float) -> None:
    subject = subject_of(make())
    before = copy.deepcopy(subject.model.state_dict())
    if (make, method) == (gemma, "slicegpt"):
        with pytest.raises(Unsuited):
            RIVALS[method](subject, share)
        return
    row = lm.point(subject, tokens_of(), method, share, None)

    biases = 16 * 32 if method == "flap" else 0
    assert 0.5 * share < row["kept"] <= share + biases / subject.limit(1.0).dense + 1e-4
    assert 1 < row["wikitext2"] < math.inf
    for name, value in subject.model.state_dict().items():
        assert torch.equal(value, before[name]), f"{method} changed the dense model's {name}"


def test_a_uniform_budget_is_used_up() -> None:
    subject = subject_of(llama())
    for share in (0.9, 0.8, 0.7, 0.5):
        limit = subject.limit(share)
        assert 0.97 * limit.budget < limit.spent(uniform_counts(subject, share)) <= limit.budget


def test_flap_moves_the_mean_of_what_it_removes_into_a_bias() -> None:
    """With constant activations nothing is lost: whatever is removed, the bias says the same."""
    subject = subject_of(llama())
    subject.calibration = torch.full((4, 16), 7)  # one token throughout: every position sees the same
    ids = subject.calibration[:1]
    student = RIVALS["flap"](subject, 0.5)
    _same_logits(student, subject.model, ids)


def test_replaceme_is_nearer_to_the_dense_model_than_dropping_the_same_layers() -> None:
    subject = subject_of(llama())
    ids = subject.calibration
    with torch.inference_mode():
        dense = subject.model.model(input_ids=ids).last_hidden_state
        mapped = RIVALS["replaceme"](subject, 0.8)
        plain = copy.deepcopy(mapped)
        for layer, whole in zip(plain.model.layers, subject.model.model.layers, strict=True):
            layer.load_state_dict(whole.state_dict()) if layer.state_dict() else None
        distances = [F.mse_loss(m.model(input_ids=ids).last_hidden_state, dense) for m in (mapped, plain)]
    assert distances[0] < distances[1]


def test_slicing_nothing_changes_nothing() -> None:
    subject = subject_of(llama())
    ids = subject.calibration[:2]
    _same_logits(RIVALS["slicegpt"](subject, 2.0), subject.model, ids)


def _same_logits(one: Any, other: Any, ids: torch.Tensor) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(one(input_ids=ids).logits, other(input_ids=ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("make", [llama, slow(gemma)])
def test_our_methods_stay_within_the_budget(make: Any, method: str) -> None:
    subject = subject_of(make())
    row = lm.point(subject, tokens_of(), method, 0.6, None)
    assert 0.4 < row["kept"] <= 0.6
    assert math.isfinite(row["squad"])


def test_one_round_is_what_the_library_does() -> None:
    subject = subject_of(llama())
    tokens = tokens_of()
    mine, own = (lm.point(subject, tokens, name, 0.6, None) for name in ("surgeon:rounds=1", "surgeon"))
    assert mine["wikitext2"] == pytest.approx(own["wikitext2"], rel=1e-3)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(SystemExit, match="No option turns"):
        variant_of("surgeon:turns=2")
    with pytest.raises(SystemExit, match="No method 'prayer'"):
        variant_of("prayer")


def test_a_second_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(lm, "unpack", lambda folder: (llama(), tokens_of() | {"calibration": np.zeros((8, 16))}, FACTS))
    arguments = [
        "lm.py",
        "run",
        "--pack",
        "x",
        "--out",
        str(tmp_path / "o"),
        "--methods",
        "magnitude",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, "--shares", "0.8"])
    for expected in (2, 2):
        options = lm.parse()
        options.command(options)
        assert len(lm.read(tmp_path / "o")) == expected
    monkeypatch.setattr(sys, "argv", ["lm.py", "show", str(tmp_path / "o")])
    options = lm.parse()
    options.command(options)
    assert "| magnitude |" in capsys.readouterr().out


FACTS = {"name": "tiny"}


@pytest.mark.parametrize("make", [llama, gemma])
def test_the_weights_of_a_unit_are_those_that_go_with_it(make: Any) -> None:
    """With one unit cut out, the sum of all squares falls by what was counted for it."""
    model = make()
    sublayers = structure_of(model).sublayers
    for number in (2, 3):
        counted = unit_sums(sublayers[number], lambda w: w.detach().square())
        gone = 1
        kept = [torch.arange(s.units) for s in sublayers]
        kept[number] = torch.tensor([u for u in range(sublayers[number].units) if u != gone])
        both = (model, shrink(model, kept))
        whole, rest = (sum(float(p.detach().double().square().sum()) for p in m.parameters()) for m in both)
        assert float(counted[gone]) == pytest.approx(whole - rest, rel=1e-4)
