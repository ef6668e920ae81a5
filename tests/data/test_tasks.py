import numpy as np
import pytest
from transformers import (
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
)

from shearling.data import TASKS, Rows, find_task, infer_task
from shearling.data.columns import (
    find_label_column,
    find_text_columns,
    read_classes,
    read_scores,
    read_tags,
    read_texts,
)
from shearling.data.tasks import METRICS, check_head
from shearling.errors import DataError, InputError, ModelError

from .tiny import bert_config, build, gpt_config

MNLI = {"contradiction": 0, "neutral": 1, "entailment": 2}


def config(**label2id):
    return bert_config(label2id=label2id, id2label={index: name for name, index in label2id.items()})


def test_the_table_names_every_task():
    paper = ["mnli", "qqp", "qnli", "sst2", "stsb", "mrpc", "rte", "cola", "squad", "squad_v2"]
    generic = ["classification", "regression", "token-classification", "question-answering", "embedding", "lm"]
    generic += ["seq2seq", "knn"]
    search = ["sts", "retrieval", "rerank"]
    assert set(TASKS) == {*paper, *generic, *search}
    assert all(TASKS[name].kind == name for name in generic)
    assert [TASKS[name].kind for name in search] == ["embedding", "retrieval", "rerank"]
    assert [TASKS[name].head for name in search] == ["embedding", "embedding", "regression"]
    assert all(task.metric in METRICS[task.kind] for task in TASKS.values())
    assert [TASKS[name].max_length for name in ("mnli", "sst2", "cola", "squad")] == [128, 64, 64, 384]
    assert TASKS["squad_v2"].stride == 128
    assert (TASKS["stsb"].metric, TASKS["cola"].metric) == ("spearman", "matthews")


@pytest.mark.parametrize(("name", "found"), [("SST-2", "sst2"), ("squad_v2", "squad_v2"), ("SQuADv2", "squad_v2")])
def test_find_task_reads_variants(name, found):
    assert find_task(name) is TASKS[found] is find_task(TASKS[found])


def test_find_task_names_the_nearest():
    with pytest.raises(InputError, match="did you mean mrpc"):
        find_task("mprc")
    with pytest.raises(InputError, match="The tasks are mnli, qqp"):
        find_task("zzzzzz")


@pytest.mark.parametrize(
    ("model_class", "options", "name"),
    [
        (BertForSequenceClassification, {"num_labels": 3}, "classification"),
        (BertForSequenceClassification, {"num_labels": 1}, "regression"),
        (BertForSequenceClassification, {"num_labels": 2, "problem_type": "regression"}, "regression"),
        (BertForTokenClassification, {}, "token-classification"),
        (BertForQuestionAnswering, {}, "question-answering"),
        (BertForMaskedLM, {}, "lm"),
        (BertModel, {}, "embedding"),
    ],
)
def test_infer_task_by_the_head(model_class, options, name):
    model = build(model_class, bert_config(**options))
    assert infer_task(model) is TASKS[name]
    check_head(model, TASKS[name])


def test_infer_task_of_a_decoder():
    assert infer_task(build(GPT2LMHeadModel, gpt_config())) is TASKS["lm"]


def test_heads_without_a_task():
    with pytest.raises(ModelError, match="BertForNextSentencePrediction does not say its task"):
        infer_task(build(BertForNextSentencePrediction, bert_config()))


def test_several_labels_an_example_can_be_pruned_but_not_scored():
    several = build(BertForSequenceClassification, bert_config(problem_type="multi_label_classification"))
    assert infer_task(several) is TASKS["classification"]
    with pytest.raises(ModelError, match="several labels per example"):
        check_head(several, TASKS["classification"])


def test_check_head_refuses_another_kind():
    with pytest.raises(ModelError, match="task squad needs a model for question-answering"):
        check_head(build(BertForSequenceClassification, bert_config()), TASKS["squad"])
    with pytest.raises(ModelError, match="task stsb needs a model for regression"):
        check_head(build(BertForSequenceClassification, bert_config(num_labels=2)), TASKS["stsb"])


@pytest.mark.parametrize(
    ("task", "columns", "found"),
    [
        ("qnli", ("question", "sentence", "label"), ("question", "sentence")),
        ("mnli", ("sentence1", "sentence2", "gold"), ("sentence1", "sentence2")),
        ("classification", ("text", "label"), ("text",)),
        ("classification", ("text_a", "text_b", "text"), ("text_a", "text_b")),
        ("classification", ("utterance", "label"), ("utterance",)),  # the only strings there are
        ("lm", ("body",), ("body",)),
        ("sts", ("text",), ("text",)),  # to prune; a score needs pairs
    ],
)
def test_find_text_columns(task, columns, found):
    rows = Rows({name: ["x"] for name in columns})
    assert find_text_columns(rows, TASKS[task]) == found


def test_text_columns_that_are_not_there():
    rows = Rows({"premise": ["x"], "other": ["y"]})
    with pytest.raises(DataError, match=r"premise\+hypothesis.*has \['premise', 'other'\].*--text-columns"):
        find_text_columns(rows, TASKS["mnli"])
    with pytest.raises(DataError, match="no column 'txt'"):
        find_text_columns(rows, TASKS["mnli"], ["premise", "txt"])
    with pytest.raises(DataError, match=r"takes 2 text column.* 1 were given: other"):
        find_text_columns(rows, TASKS["mnli"], ["other"])
    with pytest.raises(DataError, match=r"takes 1 or 2 text column"):
        find_text_columns(rows, TASKS["classification"], ["premise", "other", "premise"])
    assert find_text_columns(rows, TASKS["mnli"], ["other", "premise"]) == ("other", "premise")


def test_label_columns():
    rows = Rows({"text": ["x"], "sentiment": ["y"]})
    assert find_label_column(rows, TASKS["classification"]) == "sentiment"
    assert find_label_column(rows, TASKS["sst2"]) is None
    with pytest.raises(DataError, match="no column 'stars'"):
        find_label_column(rows, TASKS["sst2"], "stars")


@pytest.mark.parametrize(
    ("task", "model", "labels", "expected"),
    [
        ("classification", {"A": 0, "B": 1}, ["B", "A"], [1, 0]),
        ("classification", {"A": 0, "B": 1}, ["b", "A"], [1, 0]),
        ("classification", {"a": 0, "A": 1}, ["A", "a"], [1, 0]),
        ("classification", {"A": 0, "B": 1}, ["1", "0"], [1, 0]),  # csv
        ("classification", {"A": 0, "B": 1}, ["1.0", "0.0"], [1, 0]),  # csv of pandas, where a label is missing
        ("classification", {"1.0": 0, "2.0": 1}, ["1.0", "2.0"], [0, 1]),  # the model's own names
        ("classification", {"A": 0, "B": 1}, [True, 0.0], [1, 0]),
        ("qnli", {"LABEL_0": 0, "LABEL_1": 1}, ["not_entailment", "entailment"], [1, 0]),
        ("mnli", MNLI, ["entailment", "contradiction"], [2, 0]),
        ("mnli", {name.upper(): index for name, index in MNLI.items()}, ["entailment", "contradiction"], [2, 0]),
        ("mnli", MNLI, [0, 1, 2], [2, 1, 0]),  # the data's integers, in the order of the model
        ("mnli", {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, [0, 1, 2], [0, 1, 2]),
    ],
)
def test_class_labels(task, model, labels, expected):
    rows = Rows({"label": labels})
    assert read_classes(rows, "label", TASKS[task], config(**model)).tolist() == expected


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 2], r"labels \[2\].*2 outputs \(0 to 1\)"),
        ([-1, 0], r"labels \[-1\]"),
        ([0, float("nan")], "row 2 .*holds nan"),
        ([0, None], "row 2 .*holds None"),
        ([0, 0.5], "holds 0.5; class labels are whole numbers"),
        ([0, "A"], "mixes 1 strings with 1 other"),
        (["A", "C"], r"label 'C', the known labels are \['A', 'B'\]"),
        (["A", ""], "row 2 of column 'label' of .* is empty"),
        (["1", ""], "row 2 of column 'label' of .* is empty"),
    ],
)
def test_bad_class_labels(labels, message):
    with pytest.raises(DataError, match=message):
        read_classes(Rows({"label": labels}), "label", TASKS["classification"], config(A=0, B=1))


def test_a_long_value_is_cut_short_in_the_message():
    rows = Rows({"text": [dict.fromkeys(map(str, range(9999)), "a text")]})
    for read in (read_texts, read_scores):
        with pytest.raises(DataError, match=r"row 1 .*\.\.\.;") as caught:
            read(rows, "text")
        assert len(str(caught.value)) < 200


def test_scores():
    assert read_scores(Rows({"score": [1, "2.5", 0.1]}), "score").tolist() == [1.0, 2.5, np.float32(0.1)]
    for bad in ("high", None, float("inf"), [1]):
        with pytest.raises(DataError, match=r"row 2 .*must be a number"):
            read_scores(Rows({"score": [1.0, bad]}), "score")


def test_tags():
    names = config(**{"O": 0, "B-PER": 1})
    rows = Rows({"tags": [["O", "B-PER"], [], ["B-PER"]]})
    assert [tags.tolist() for tags in read_tags(rows, "tags", TASKS["token-classification"], names)] == [
        [0, 1],
        [],
        [1],
    ]
    numbers = Rows({"tags": [[0, -100, 1]]})
    assert read_tags(numbers, "tags", TASKS["token-classification"], names)[0].tolist() == [0, -100, 1]
    with pytest.raises(DataError, match="one tag per word"):
        read_tags(Rows({"tags": ["O"]}), "tags", TASKS["token-classification"], names)
