"""Polish brings the student nearer to the teacher on examples it did not learn from, or leaves it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shearling.engine.pools
import shearling.engine.states
from families import tiny_batches, tiny_model
from shearling.engine.distil import Recipe, Trainer, trainable
from shearling.engine.polish import WORTH, Polished, PolishSettings, polish
from shearling.engine.pools import pools_of
from shearling.engine.states import Watcher
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.sample.sample import Sample, sample_of

RECIPE = Recipe(rate=3e-3, examples=8)
CPU = torch.device("cpu")


def case(family: str = "bert", dtype: torch.dtype = torch.float32) -> tuple[Structure, Structure, Sample]:
    """A teacher, the half of it that is left, and a sample."""
    teacher = structure_of(tiny_model(family).to(dtype))
    kept = [torch.arange(0, s.units, 2) for s in teacher.sublayers]
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in tiny_batches(family, 6)]
    return teacher, structure_of(shrink(teacher.model, kept)), sample_of(batches)


def state_of(structure: Structure) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in structure.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def traces_of(structure: Structure) -> list[Any]:
    """What a run could leave behind: hooks, gradients, frozen weights, another mode."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in structure.model.modules()]
    return [*hooks, *((p.requires_grad, p.grad is None) for p in structure.model.parameters())]


def logits_of(structure: Structure, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = structure.model(**inputs).logits
    return logits


@pytest.mark.parametrize(
    "family",
    ["bert", "camembert", "distilbert", "mpnet", "albert", "modernbert", "gpt2", "t5", "vit", "clip", "wav2vec2"],
)
def test_it_gets_better_and_leaves_embeddings_and_teacher_alone(family: str) -> None:
    teacher, student, sample = case(family)
    before_t, before_s = state_of(teacher), state_of(student)
    for structure in (teacher, student):  # some models hook themselves when they first run
        structure.model(**sample.batches[0].inputs)
    traces = [traces_of(structure) for structure in (teacher, student)]
    result = polish(teacher, student, sample, PolishSettings(6, RECIPE))
    assert result.kept
    assert result.judge_after < result.judge_before  # type: ignore[operator]
    assert same(before_t, state_of(teacher))
    after = state_of(student)
    assert not same(before_s, after)
    for name, module in student.model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            assert torch.equal(after[f"{name}.weight"], before_s[f"{name}.weight"])
    assert [traces_of(structure) for structure in (teacher, student)] == traces


def test_the_judge_is_the_divergence_on_examples_kept_out() -> None:
    teacher, student, sample = case()

    def judged() -> float:
        found = []
        for batch in sample:
            for i in batch.held_out().nonzero().flatten().tolist():
                example = batch.part(i, i + 1).inputs
                s, t = (logits_of(m, example).log_softmax(-1) for m in (student, teacher))
                found.append(float(F.kl_div(s, t, reduction="batchmean", log_target=True)))
        return sum(found) / len(found)

    before = judged()
    result = polish(teacher, student, sample, PolishSettings(3, RECIPE))
    assert result.judge_before == pytest.approx(before, rel=1e-3)
    assert result.judge_after == pytest.approx(judged(), rel=1e-3)
    assert (result.passes, result.examples) == (3, 24)


def test_the_loss_is_that_of_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against hidden states that the models themselves put out, example by example, padding cut off."""
    monkeypatch.setitem(shearling.engine.pools.SHAPES, "cpu", 1)
    teacher, student, sample = case()
    with trainable(student.model) as weights, Watcher(teacher, "float32") as t, Watcher(student, "float32") as s:
        trainer = Trainer(t, s, pools_of(sample, CPU), weights, Recipe(examples=24, hidden=2.0), 0)
        (targets,) = trainer.targets
        rows = torch.tensor([1, 5, 2, 20])
        found = trainer.loss(targets, rows).detach()
        inputs = targets.pool.examples.inputs
    tokens: dict[int, list[tuple[Tensor, Tensor]]] = {}
    divergence = 0.0
    for row in range(24):
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
    result = polish(teacher, student, sample, PolishSettings(2, Recipe(rate=10.0, examples=8)))
    assert not result.kept
    assert result.judge_after == result.judge_before
    assert same(before, state_of(student))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_half_precision_stays_half_precision(family: str, dtype: torch.dtype) -> None:
    teacher, student, sample = case(family, dtype)
    result = polish(teacher, student, sample, PolishSettings(6, RECIPE))
    assert result.kept
    assert {p.dtype for p in student.model.parameters()} == {dtype}
    again = polish(teacher, student, sample, PolishSettings(1, Recipe(rate=0.0, examples=8)))
    assert again.judge_before == pytest.approx(result.judge_after, rel=1e-3)  # as it is after rounding


def test_an_interrupt_keeps_the_best_so_far() -> None:
    teacher, student, sample = case()
    traces = traces_of(student)
    done = 0

    def progress(step: int, total: int) -> None:
        nonlocal done
        done = step
        if step > total // 2:
            raise KeyboardInterrupt

    result = polish(teacher, student, sample, PolishSettings(6, RECIPE), progress=progress)
    assert result.passes == 3
    assert "interrupted after 3 of 6 passes" in result.note
    assert result.kept
    assert done
    assert traces_of(student) == traces


def test_an_interrupt_before_the_first_pass_leaves_the_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, sample = case()
    before = state_of(student)

    def interrupted(self: Trainer) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "judge", interrupted)
    result = polish(teacher, student, sample, PolishSettings(6, RECIPE))
    assert "as the refit left it" in result.note
    assert same(before, state_of(student))


def test_an_error_leaves_the_student_as_it_was() -> None:
    teacher, student, sample = case()
    before, traces = state_of(student), traces_of(student)

    def progress(step: int, total: int) -> None:
        if step == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        polish(teacher, student, sample, PolishSettings(6, RECIPE), progress=progress)
    assert same(before, state_of(student))
    assert traces_of(student) == traces


def test_out_of_memory_goes_on_with_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, sample = case()
    sizes = []
    step = Trainer.step

    def short(self: Trainer, targets: Any, rows: Tensor) -> None:
        sizes.append(len(rows))
        if len(rows) > 4:
            raise torch.OutOfMemoryError
        step(self, targets, rows)

    monkeypatch.setattr(Trainer, "step", short)
    assert polish(teacher, student, sample, PolishSettings(4, RECIPE)).kept
    assert sizes[0] == 8
    assert set(sizes[1:]) <= {1, 2, 3, 4}


def test_off_and_not_worth_it() -> None:
    teacher, student, sample = case()
    before = state_of(student)
    off = polish(teacher, student, sample, PolishSettings("off"))
    small = polish(teacher, student, sample, PolishSettings("auto"), expected_loss=WORTH / 2)
    for result, word in ((off, "off"), (small, "estimated loss")):
        assert word in result.note
        assert (result.passes, result.judge_before, result.kept) == (0, None, False)
    assert same(before, state_of(student))


def test_seconds_become_passes() -> None:
    teacher, student, sample = case()
    few = polish(teacher, student, sample, PolishSettings("auto", RECIPE), expected_loss=1.0, most_seconds=1e-6)
    assert few.passes == 1
    assert polish(teacher, student, sample, PolishSettings(1e-6, RECIPE)).passes == 1
    many = polish(teacher, student, sample, PolishSettings(0.5, RECIPE))
    assert many.passes > 1


def results(sample: Sample, seed: int = 0) -> tuple[Polished, dict[str, Tensor]]:
    teacher, student, _ = case()
    return polish(teacher, student, sample, PolishSettings(3, RECIPE), seed=seed), state_of(student)


def test_a_seed_decides() -> None:
    sample = case()[2]
    first, again, other = results(sample), results(sample), results(sample, seed=1)
    assert first[0].judge_after == again[0].judge_after
    assert same(first[1], again[1])
    assert not same(first[1], other[1])


def test_a_teacher_whose_states_find_no_room_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = case()[2]
    kept = results(sample)
    monkeypatch.setattr(shearling.engine.states, "HOST_BYTES", 0)
    anew = results(sample)
    assert anew[0].judge_after == pytest.approx(kept[0].judge_after, rel=0.05)  # bfloat16 against float32


def test_a_sample_with_nothing_to_keep_out() -> None:
    teacher, student, sample = case()
    result = polish(teacher, student, sample.first(6), PolishSettings(4, RECIPE))
    assert result.kept
    assert result.examples == 6
