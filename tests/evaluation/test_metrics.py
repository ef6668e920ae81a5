import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shearling.evaluation import metrics

labels = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)
values = st.floats(-1e6, 1e6).map(lambda x: round(x, 3)) | st.integers(-3, 3).map(float)
pairs = st.lists(st.tuples(values, values), min_size=2, max_size=40)


@pytest.mark.filterwarnings("ignore:A single label was found")  # and rightly so: hypothesis draws such cases
@given(labels)
@settings(deadline=None)
def test_class_metrics_agree_with_scikit_learn(pairs):
    reference = pytest.importorskip("sklearn.metrics")
    gold, guess = map(list, zip(*pairs, strict=True))
    assert metrics.accuracy(gold, guess) == pytest.approx(reference.accuracy_score(gold, guess))
    assert metrics.matthews(gold, guess) == pytest.approx(reference.matthews_corrcoef(gold, guess), abs=1e-9)
    ones = [int(label == 1) for label in gold], [int(label == 1) for label in guess]
    assert metrics.binary_f1(*ones) == pytest.approx(reference.f1_score(*ones, zero_division=0))


@given(pairs)
@settings(deadline=None)
def test_correlations_agree_with_scipy(pairs):
    stats = pytest.importorskip("scipy.stats")
    x, y = map(np.array, zip(*pairs, strict=True))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert metrics.spearman(x, y) == metrics.pearson(x, y) == 0.0
        return
    assert metrics.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
    assert metrics.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-6)


@given(pairs)
def test_spearman_knows_only_the_order(pairs):
    x, y = map(np.array, zip(*pairs, strict=True))
    assert metrics.spearman(x, y) == pytest.approx(metrics.spearman(3 * x + 1, -y) * -1, abs=1e-9)
    assert -1 - 1e-9 <= metrics.spearman(x, y) <= 1 + 1e-9


def test_pearson_of_huge_and_tiny_numbers():
    assert metrics.pearson([1e300, 2e300, 3e300], [1e-300, 2e-300, 3e-300]) == pytest.approx(1.0)


def test_perplexity():
    assert metrics.perplexity(10 * np.log(7), 10) == pytest.approx(7)
    assert np.isfinite(metrics.perplexity(1e9, 1))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-PER I-PER O", {("PER", 1, 2)}),
        ("I-PER I-PER B-PER O", {("PER", 0, 1), ("PER", 2, 2)}),  # IOB1
        ("B-PER I-LOC", {("PER", 0, 0), ("LOC", 1, 1)}),
        ("B-PER B-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        ("S-PER B-LOC I-LOC E-LOC", {("PER", 0, 0), ("LOC", 1, 3)}),  # BIOES
        ("U-PER B-LOC L-LOC", {("PER", 0, 0), ("LOC", 1, 2)}),  # BILOU
        ("E-PER I-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        ("I-PER", {("PER", 0, 0)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities(tags, expected):
    assert metrics.entities(tags.split()) == expected


def conlleval_entities(tags):
    """The chunk rules of the conlleval script, one by one."""

    def ends(before, tag, kind_before, kind):
        return before in "ES" or (before in "BI" and tag in "BSO") or (before != "O" and kind_before != kind)

    def starts(before, tag, kind_before, kind):
        return tag in "BS" or (before in "ESO" and tag in "EI") or (tag != "O" and kind_before != kind)

    found, open_at = set(), 0
    before, kind_before = "O", ""
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if before != "O" and ends(before, prefix, kind_before, kind):
            found.add((kind_before, open_at, index - 1))
        if starts(before, prefix, kind_before, kind):
            open_at = index
        before, kind_before = prefix, kind
    return found


@given(st.lists(st.sampled_from(["O", *(f"{p}-{k}" for p in "BIES" for k in ("PER", "LOC"))]), max_size=12))
def test_entities_agree_with_the_rules_of_conlleval(tags):
    assert metrics.entities(tags) == conlleval_entities(tags)


def test_entity_f1():
    gold = [["B-PER", "I-PER", "O"], ["B-LOC"]]
    guess = [["B-PER", "O", "O"], ["B-LOC"]]
    assert metrics.entity_f1(gold, guess) == (0.5, 0.5, 0.5)
    assert metrics.entity_f1(gold, gold) == (1.0, 1.0, 1.0)
    assert metrics.entity_f1([["O"]], [["O"]]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The  Cat, sat!", "cat sat"), ("an", ""), ("theatre", "theatre"), ("U.S.", "us"), ("a\u00a0b", "b")],
)
def test_normalize_answer(text, expected):
    assert metrics.normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("predicted", "gold", "em", "f1"),
    [
        ("the Eiffel Tower", ["Eiffel Tower"], 1, 1),
        ("tower", ["Eiffel Tower", "steel"], 0, 2 / 3),
        ("", [], 1, 1),
        ("Paris", [], 0, 0),
        ("", ["Paris"], 0, 0),
        ("", ["the"], 1, 1),  # a gold answer of articles only is no answer
        ("a a b b", ["b b b"], 0, 0.8),
        ("Paris", ["Lyon", "Paris"], 1, 1),
    ],
)
def test_squad_scores(predicted, gold, em, f1):
    found = metrics.squad_em_f1([predicted], [gold])
    assert [score.tolist() for score in found] == [[em], [pytest.approx(f1)]]


answers = st.text(alphabet="ab the.,", max_size=12)


@given(answers, st.lists(answers, max_size=3))
def test_squad_scores_agree_with_a_plain_reading(predicted, gold):
    def tokens(text):
        return re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[.,]", "", text.lower())).split()

    def f1(guess, truth):
        if not guess or not truth:
            return float(guess == truth)
        shared = sum((Counter(guess) & Counter(truth)).values())
        if not shared:
            return 0.0
        precision, recall = shared / len(guess), shared / len(truth)
        return 2 * precision * recall / (precision + recall)

    truths = [tokens(text) for text in gold if tokens(text)] or [[]]
    em, best = metrics.squad_em_f1([predicted], [gold])
    assert em[0] == max(tokens(predicted) == truth for truth in truths)
    assert best[0] == pytest.approx(max(f1(tokens(predicted), truth) for truth in truths))


def test_longest_common_subsequence_equals_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        first, second = (rng.choice(list("abc"), size=rng.integers(0, 7)).tolist() for _ in range(2))
        subsequences = {pick for size in range(len(first) + 1) for pick in itertools.combinations(first, size)} & {
            pick for size in range(len(second) + 1) for pick in itertools.combinations(second, size)
        }
        assert metrics.longest_common(first, second) == max(map(len, subsequences))


def test_rouge_l() -> None:
    assert metrics.rouge_l("The cat sat.", "the CAT sat") == 1
    assert metrics.rouge_l("police killed the gunman", "police kill the gunman") == pytest.approx(0.75)
    assert metrics.rouge_l("police killed the gunman", "the gunman kill police") == pytest.approx(0.5)
    assert metrics.rouge_l("", "a") == metrics.rouge_l("a", "") == 0
