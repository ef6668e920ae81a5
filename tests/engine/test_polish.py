"""Polish brings the student nearer to the teacher on examples it did not learn from, or leaves it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import shearling
import shearling.engine.distil
import shearling.engine.polish
import shearling.engine.targets
from families import tiny_batches, tiny_model
from shearling.engine.distil import Distiller, Recipe, trainable
from shearling.engine.polish import (
    DEPTH,
    FEW_RATE,
    FEWEST,
    FULL_RATE,
    MANY,
    PASSES,
    WIDTH,
    WORTH,
    Polished,
    checked_polish,
    polish,
    recipe_for,
    seconds_of,
)
from shearling.engine.targets import MadeOn, Observed
from shearling.errors import InputError
from shearling.models.shrink import Cut, shrink
from shearling.models.structure import Structure, structure_of
from shearling.sample.read import accepted_by, sample_of
from shearling.sample.sample import Sample
from tiny import batches_of, model_of

RECIPE = Recipe(rate=3e-3, examples=8, noise=0.0)


def case(family: str = "bert", dtype: torch.dtype = torch.float32, examples: int = 6) -> Any:
    """A teacher, the half of it that is left, and a sample."""
    teacher = structure_of(tiny_model(family).to(dtype))
    kept = [torch.arange(0, s.units, 2) for s in teacher.sublayers]
    raw = tiny_batches(family, examples)
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in raw]
    sample = sample_of(batches, accepted=accepted_by(teacher.model))
    return teacher, structure_of(shrink(teacher.model, kept)), sample


def polished(teacher: Structure, student: Structure, sample: Sample, setting: Any = 6, **more: Any) -> Polished:
    return polish(teacher, student, sample, setting, **{"share": 0.1, "recipe": RECIPE, **more})


@contextmanager
def distillers(teacher: Structure, student: Structure, sample: Sample) -> Iterator[Callable[[Recipe], Distiller]]:
    """What makes a distiller of a recipe, as the stage does."""
    with (
        trainable(student.model) as weights,
        Observed(teacher, "float32").watched() as t,
        Observed(student, "float32").watched() as s,
    ):
        yield lambda recipe: Distiller(t, s, sample, weights, recipe, 0)


def state_of(structure: Structure) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in structure.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def traces_of(structure: Structure) -> list[Any]:
    """What a run could leave behind: hooks, gradients, frozen weights, another mode."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in structure.model.modules()]
    return [*hooks, *((p.requires_grad, p.grad is None) for p in structure.model.parameters())]


@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "mpnet", "albert", "modernbert", "gpt2", "t5", "vit", "clip", "wav2vec2"]
)
def test_it_gets_better_and_leaves_embeddings_and_teacher_alone(family: str) -> None:
    teacher, student, sample = case(family)
    before_t, before_s = state_of(teacher), state_of(student)
    for structure in (teacher, student):  # some models hook themselves when they first run
        structure.model(**sample.some(2).inputs)
    traces = [traces_of(structure) for structure in (teacher, student)]
    rate = 1e-2 if family == "t5" else RECIPE.rate  # its random weights are far larger
    result = polished(teacher, student, sample, recipe=replace(RECIPE, rate=rate))
    assert result.after < result.before  # type: ignore[operator]
    assert same(before_t, state_of(teacher))
    after = state_of(student)
    assert not same(before_s, after)
    for name, module in student.model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            assert torch.equal(after[f"{name}.weight"], before_s[f"{name}.weight"])
    assert [traces_of(structure) for structure in (teacher, student)] == traces


def judged(teacher: Structure, student: Structure, sample: Sample) -> float:
    """The judge by its definition: divergence on the examples kept out, one by one, without padding."""
    found = []
    for batch in sample.cut(1):
        if bool(batch.held_out()):
            with torch.no_grad():
                s, t = (m.model(**batch.inputs).logits.log_softmax(-1) for m in (student, teacher))
            found.append(float(F.kl_div(s, t, reduction="batchmean", log_target=True)))
    return sum(found) / len(found)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_judge_is_the_divergence_on_examples_kept_out(noise: float) -> None:
    """Noise is for the examples that teach; those that judge stay as they are."""
    teacher, student, sample = case()
    before = judged(teacher, student, sample)
    result = polished(teacher, student, sample, 3, recipe=Recipe(rate=3e-3, examples=8, noise=noise))
    assert result.before == pytest.approx(before, rel=1e-3)
    assert result.after == pytest.approx(judged(teacher, student, sample), rel=1e-3)
    assert (result.passes, result.examples) == (3, sample.examples)


def test_the_loss_is_that_of_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against hidden states that the models themselves put out, example by example, padding cut off."""
    monkeypatch.setitem(shearling.engine.targets.SHAPES, "cpu", 1)
    teacher, student, sample = case()
    count = sample.examples
    with distillers(teacher, student, sample) as make:
        distiller = make(Recipe(examples=count, hidden=2.0, noise=0.0))
        (bucket,) = distiller.buckets
        rows = torch.tensor([1, 5, 2, 20])
        found = distiller.loss(bucket, rows).detach()
        inputs = bucket.batch.inputs
    tokens: dict[int, list[tuple[Tensor, Tensor]]] = {}
    divergence = 0.0
    for row in range(count):
        length = int(inputs["attention_mask"][row].sum())
        example = {name: value[row : row + 1, :length] for name, value in inputs.items()}
        with torch.no_grad():
            a, b = (m.model(**example, output_hidden_states=True) for m in (student, teacher))
        for layer, (x, y) in enumerate(zip(a.hidden_states[1:], b.hidden_states[1:], strict=True)):
            tokens.setdefault(layer, []).append((x[0], y[0]))
        if row in rows.tolist():
            logs = (m.logits.log_softmax(-1) for m in (a, b))
            divergence += float(F.kl_div(*logs, reduction="batchmean", log_target=True)) / 4
    errors = []
    for pairs in tokens.values():
        spread = torch.cat([y for _, y in pairs]).var(0, correction=0).mean()
        chosen = [pairs[row] for row in rows.tolist()]
        error = torch.cat([x for x, _ in chosen]) - torch.cat([y for _, y in chosen])
        errors.append(float(error.square().mean() / spread))
    expected = divergence + 2 * sum(errors) / len(errors)
    assert float(found) == pytest.approx(expected, rel=1e-2)  # the teacher's states are kept in bfloat16


def test_never_worse_than_before() -> None:
    teacher, student, sample = case()
    before = state_of(student)
    result = polished(teacher, student, sample, 2, recipe=Recipe(rate=10.0, examples=8))
    assert "no state was better" in result.why
    assert result.after == result.before
    assert same(before, state_of(student))


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_half_precision_stays_half_precision(family: str) -> None:
    teacher, student, sample = case(family, torch.bfloat16)
    result = polished(teacher, student, sample)
    assert result.after < result.before  # type: ignore[operator]
    assert {p.dtype for p in student.model.parameters()} == {torch.bfloat16}
    again = polished(teacher, student, sample, 1, recipe=Recipe(rate=0.0, examples=8))
    assert again.before == pytest.approx(result.after, rel=1e-3)  # as it is after rounding


@pytest.mark.parametrize("family", ["bert", "modernbert", "vit", "gpt2"])
def test_steps_in_half_precision_do_as_well(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the model computes in bfloat16, its weights stay float32, and nothing of the copies is left."""
    monkeypatch.setattr(shearling.engine.distil, "has_bfloat16", lambda device: True)
    found = {}
    for precision in ("bfloat16", "tf32"):
        teacher, student, sample = case(family)
        before = state_of(student)
        found[precision] = polished(teacher, student, sample, recipe=replace(RECIPE, precision=precision))
        after = state_of(student)
        assert {value.dtype for value in after.values()} == {value.dtype for value in before.values()}
        changed = [name for name in after if not torch.equal(after[name], before[name])]
        assert any((after[name].bfloat16().float() != after[name]).any() for name in changed)
    half, full = found["bfloat16"], found["tf32"]
    assert half.before == pytest.approx(full.before, rel=1e-6)  # the judge is float32
    assert 1 - half.after / half.before == pytest.approx(1 - full.after / full.before, rel=0.1)


def test_models_that_cannot_be_halved_are_polished_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shearling.engine.distil, "has_bfloat16", lambda device: True)
    teacher, student, sample = case()

    def only_float32(module: Any, args: Any) -> None:
        if args[0].dtype != torch.float32:
            raise RuntimeError("written for float32")

    handle = student.model.classifier.register_forward_pre_hook(only_float32)
    with caplog.at_level("INFO", "shearling"):
        result = polished(teacher, student, sample)
    handle.remove()
    assert "Polishing without bfloat16: written for float32" in caplog.text
    assert result.after < result.before  # type: ignore[operator]


def test_an_interrupt_keeps_the_best_so_far() -> None:
    teacher, student, sample = case()
    traces = traces_of(student)

    def progress(step: int, total: int) -> None:
        if step > total // 2:
            raise KeyboardInterrupt

    result = polished(teacher, student, sample, progress=progress)
    assert result.passes == 3
    assert "interrupted after 3 of 6 passes" in result.why
    assert result.after < result.before  # type: ignore[operator]
    assert traces_of(student) == traces


def test_an_interrupt_before_the_first_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, sample = case()
    before = state_of(student)

    def interrupted(self: Distiller) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Distiller, "judge", interrupted)
    assert "as they were" in polished(teacher, student, sample).why
    assert same(before, state_of(student))


def test_an_error_leaves_the_student_as_it_was() -> None:
    teacher, student, sample = case()
    before, traces = state_of(student), traces_of(student)

    def progress(step: int, total: int) -> None:
        if step == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        polished(teacher, student, sample, progress=progress)
    assert same(before, state_of(student))
    assert traces_of(student) == traces


def test_out_of_memory_goes_on_with_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, sample = case()
    sizes = []
    step = Distiller.step

    def short(self: Distiller, bucket: int, rows: Tensor) -> None:
        sizes.append(len(rows))
        if len(rows) > 4:
            raise torch.OutOfMemoryError
        step(self, bucket, rows)

    monkeypatch.setattr(Distiller, "step", short)
    result = polished(teacher, student, sample, 4)
    assert result.after < result.before  # type: ignore[operator]
    assert sizes[0] > 4
    assert set(sizes[1:]) <= {1, 2, 3, 4}


def test_a_model_too_large_to_polish_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, sample = case()
    before, traces = state_of(student), traces_of(student)

    def never(self: Distiller) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Distiller, "_optimiser", never)
    result = polished(teacher, student, sample, 4)
    assert (result.passes, result.before) == (0, None)
    assert "not enough memory" in result.why
    assert same(before, state_of(student))
    assert traces_of(student) == traces


def test_small_estimated_losses_are_not_worth_it() -> None:
    teacher, student, sample = case()
    before = state_of(student)
    result = polished(teacher, student, sample, "auto", expected_loss=WORTH["cpu"] / 2)
    assert "estimated loss" in result.why
    assert (result.passes, result.before) == (0, None)
    assert result.to_json().keys() == {"passes", "seconds", "examples", "why"}
    assert same(before, state_of(student))
    assert polished(teacher, student, sample, "auto", expected_loss=2 * WORTH["cpu"]).passes


def test_on_a_cpu_cheaper_students_get_more_passes() -> None:
    teacher, student, sample = case()
    passes = [polished(teacher, student, sample, "auto", share=share).passes for share in (0.2, 0.1, 0.0)]
    assert passes == sorted(passes)
    assert FEWEST <= passes[0] < passes[-1] <= PASSES


def test_a_cpu_does_not_begin_what_it_has_no_time_for() -> None:
    teacher, student, sample = case()
    result = polished(teacher, student, sample, "auto", share=0.5)
    assert (result.passes, result.before) == (0, None)
    assert "fewer than 4 passes" in result.why
    assert polished(teacher, student, sample, 1, share=0.5).passes == 1  # asked for


def test_few_passes_take_small_steps_in_small_batches() -> None:
    structure = case()[0]
    many = recipe_for(MANY, "tf32", structure)
    assert replace(many, rate=Recipe().rate) == Recipe(precision="tf32")
    rates = [recipe_for(passes, "tf32", structure).rate for passes in (FEWEST, 8, FULL_RATE, MANY - 1)]
    assert rates == sorted(rates)
    assert rates[1] < rates[2] == rates[3] == FEW_RATE * many.rate
    few = recipe_for(MANY - 1, "tf32", structure)
    assert few.examples < many.examples
    assert (few.noise, few.precision) == (many.noise, "tf32")


def test_wide_and_deep_models_take_smaller_steps() -> None:
    def rate(layers: int, width: int, passes: int = PASSES) -> float:
        config = BertConfig(
            vocab_size=64, hidden_size=width, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2
        )
        return recipe_for(passes, "float32", structure_of(BertForSequenceClassification(config))).rate

    assert rate(DEPTH, WIDTH) == pytest.approx(Recipe().rate)
    assert rate(DEPTH, 2 * WIDTH) == pytest.approx(Recipe().rate / 2)
    assert rate(4 * DEPTH, WIDTH) == pytest.approx(Recipe().rate / 2)
    assert rate(2, WIDTH // 4) == Recipe().rate
    assert rate(DEPTH, 4 * WIDTH, FULL_RATE) == pytest.approx(FEW_RATE * Recipe().rate / 2)


def test_batches_of_a_pass_are_of_equal_size() -> None:
    teacher, student, sample = case(examples=40)
    with distillers(teacher, student, sample) as make:
        distiller = make(replace(RECIPE, examples=16))
        batches = distiller._shuffled()
        for number, bucket in enumerate(distiller.buckets):
            mine = [rows for at, rows in batches if at == number]
            every = torch.cat(mine)
            assert set(every.tolist()) == set(bucket.fit.tolist())
            assert len({len(rows) for rows in mine}) == 1
            assert len(every) - len(bucket.fit) < len(mine)  # less than one example a batch is seen twice
            assert len(mine) == -(-len(bucket.fit) // 16)


def test_short_examples_share_larger_batches() -> None:
    teacher, student, sample = case(examples=40)
    with distillers(teacher, student, sample) as make:
        sizes = {}
        for tokens in (0, 64, 2**20):
            distiller = make(replace(RECIPE, examples=2, tokens=tokens))
            sizes[tokens] = [(bucket.tokens, distiller._size(bucket)) for bucket in distiller.buckets]
    assert {size for _, size in sizes[0]} == {2}
    assert all(size == max(2, 64 // length) for length, size in sizes[64])
    assert all(size * length <= shearling.engine.distil.MOST_TOKENS["cpu"] for length, size in sizes[2**20])


def test_seconds_become_passes() -> None:
    teacher, student, sample = case()
    assert polished(teacher, student, sample, "0.000001s").passes == 1
    assert polished(teacher, student, sample, "1s").passes > 1


def test_seconds_choose_the_recipe_by_the_passes_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Recipe] = []

    class Noting(Distiller):
        def train(self, passes: int, *rest: Any) -> tuple[int, str]:
            used.append(self.recipe)
            return super().train(1, *rest)

        def seconds_of_pass(self) -> float:
            return 0.1

    monkeypatch.setattr(shearling.engine.polish, "Distiller", Noting)
    for setting in ("1s", "100s"):
        polished(*case(), setting, recipe=None)
    assert used[0].rate < used[1].rate
    assert used[0].examples < used[1].examples == Recipe().examples


@pytest.mark.parametrize("setting", ["sometimes", "10", "0s", "-3s", "infs", 0, -1, True, 2.5])
def test_settings_that_make_no_sense(setting: Any) -> None:
    with pytest.raises(InputError, match="makes no sense"):
        checked_polish(setting)
    with pytest.raises(InputError):
        shearling.Surgeon(polish=setting)


def test_settings_that_do() -> None:
    for setting in ("auto", "off", 1, 40, "30s", "0.5s"):
        assert checked_polish(setting) == setting
    assert (seconds_of("30s"), seconds_of(3), seconds_of("auto")) == (30.0, None, None)


def results(sample: Sample, seed: int = 0) -> tuple[Polished, dict[str, Tensor]]:
    teacher, student, _ = case()
    recipe = Recipe(rate=3e-3, examples=8, noise=0.2)
    return polished(teacher, student, sample, 3, seed=seed, recipe=recipe), state_of(student)


def test_a_seed_decides() -> None:
    sample = case()[2]
    first, again, other = results(sample), results(sample), results(sample, seed=1)
    assert first[0].after == again[0].after
    assert same(first[1], again[1])
    assert not same(first[1], other[1])


def test_a_teacher_whose_states_find_no_room_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = case()[2]
    kept = results(sample)
    monkeypatch.setattr(shearling.engine.targets, "HOST_BYTES", 0)
    anew = results(sample)
    assert anew[0].after == pytest.approx(kept[0].after, rel=0.05)  # bfloat16 against float32


def test_a_sample_with_nothing_to_keep_out() -> None:
    teacher, student, sample = case()
    few = sample.drawn(4, 0)
    numbered = sample_of([few.some(4).inputs], accepted=accepted_by(teacher.model))
    result = polished(teacher, student, numbered)
    assert result.after < result.before  # type: ignore[operator]
    assert result.examples == 4


def test_in_a_whole_run() -> None:
    """The default polishes what loses enough, says so, and `paper` does not unless asked to."""
    model, batches = model_of("bert", "SequenceClassification"), batches_of(8, 8)
    small = shearling.prune(model, batches, flops=0.2, method=shearling.Surgeon(polish=2))
    assert small.report.polish is not None
    assert small.report.polish["passes"] == 2
    assert "polish" in small.report.seconds
    assert "passes" in str(small)
    assert shearling.prune(model, batches, flops=0.99).report.polish["why"].startswith("not worth it")  # type: ignore[index]
    assert shearling.prune(model, batches, flops=0.5, method="paper").report.polish is None
    asked = shearling.prune(model, batches, flops=0.5, method=shearling.Paper(polish=1))
    assert asked.report.polish is not None


def test_a_student_without_some_layers_learns_what_they_did() -> None:
    """Its layers are to be where the dense model is before the next layer that stayed."""
    model, batches = model_of("bert", "SequenceClassification", num_hidden_layers=4), batches_of(8, 8)
    found = shearling.prune(model, batches, flops=0.4, shape="stock", method=shearling.Surgeon(polish=3))
    assert found.report.polish is not None
    assert found.report.polish["after"] <= found.report.polish["before"]
    dense, sample = structure_of(model), sample_of(batches, accepted=accepted_by(model))
    short = Cut([torch.arange(s.units) for s in dense.sublayers], ((0, 2),)).student(dense)
    batch = sample.some(3)
    with (
        torch.no_grad(),
        Observed(dense, "float32", beside=short).watched() as t,
        Observed(short, "float32").watched() as s,
    ):
        wanted, own = t(batch), s(batch)
        whole = model(**batch.inputs, output_hidden_states=True).hidden_states
    assert len(wanted.hidden) == len(own.hidden) == 2
    torch.testing.assert_close(wanted.hidden[0], whole[2])
    torch.testing.assert_close(wanted.hidden[1], whole[4])


def test_ranges_and_numbers_are_made_where_the_model_is_unless_it_says_otherwise() -> None:
    with MadeOn(torch.device("meta")):
        assert torch.arange(3).device.type == "meta"
        assert torch.arange(3, device="cpu").device.type == "cpu"
        assert torch.zeros(3).device.type == "cpu"
        number = torch.tensor(0.5, dtype=torch.float64)
        assert (number.device.type, number.dtype, number.dim()) == ("meta", torch.float64, 0)
        assert torch.tensor([1, 2]).device.type == "cpu"
    assert torch.arange(3).device.type == "cpu"


def test_a_table_that_the_model_keeps_from_a_pass_can_be_trained_through() -> None:
    """BEiT makes its index of positions once a process, maybe in a pass without gradients."""
    model = tiny_model("beit")
    for module in model.modules():
        made = getattr(module, "generate_relative_position_index", None)
        if hasattr(made, "cache_clear"):
            made.cache_clear()  # another test may have called it
    pruned = shearling.prune(model, tiny_batches("beit"), flops=0.5, method=shearling.Surgeon(polish=1))
    assert pruned.report.polish is not None
