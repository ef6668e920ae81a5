"""Units finer than heads: the helpers' mathematics against brute force, and students that compute what they should."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import finer
from finer_model import Chooser, Finer, Kept, Study, Variant, macs, repair, sizes
from finer_parts import (
    ScoreMoments,
    column_bases,
    column_ways,
    damped,
    in_basis,
    kept_values,
    level_way,
    rank_errors,
    rank_path,
    roots,
    score_bases,
    with_heads,
)

from shearling.costs import count_macs, flops_limit
from shearling.engine.gram import Gram
from shearling.engine.polish import polish
from shearling.engine.progress import Stages
from shearling.models.structure import structure_of
from shearling.pipeline import measure
from shearling.surgeon.measure import Curvature
from shearling.surgeon.order import order
from tiny import batches_of, model_of

pytestmark = pytest.mark.slow  # the harness is not the product: its tests wait for the slow checks

DAMP = 1e-2


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curvature(heads: int = 3, width: int = 4, out: int = 6, tokens: int = 200) -> Curvature:
    n = heads * width
    h, g = randn(tokens, n) @ randn(n, n, seed=1), randn(tokens, out, seed=2) @ randn(out, out, seed=3)
    return Curvature(Gram([h.T @ h / tokens]), Gram([g.T @ g / tokens]), randn(out, n, seed=4), width)


def least_error(whole: Curvature, values: Tensor) -> float:
    """The least tr(G dW A dW^T) of an output projection that sees `values h` [c, n] instead of h, by least squares."""
    A, G = roots(whole.A.matrix)[0], roots(whole.G.matrix)[0]
    fitted = torch.linalg.lstsq((values @ A).T, (whole.W @ A).T).solution.T  # any G: every row is fitted on its own
    return float((G @ (fitted @ values - whole.W) @ A).square().sum())


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_scores_of_low_rank_are_the_best_there_are(rank: int) -> None:
    """Against the truncated SVD of the whole table of scores, biases included."""
    x, y = randn(40, 9), randn(30, 9, seed=1) @ randn(9, 9, seed=2)
    q, k = x @ randn(9, 5, seed=3) + randn(5, seed=4), y @ randn(9, 5, seed=5) + randn(5, seed=6)
    X, Y = score_bases((q.T @ q)[None], (k.T @ k)[None])
    U, S, Vh = torch.linalg.svd(q @ k.T)
    best = U[:, :rank] * S[:rank] @ Vh[:rank]
    torch.testing.assert_close(q @ X[0, :, :rank] @ Y[0, :, :rank].T @ k.T, best, rtol=1e-6, atol=1e-6)


def test_scores_are_those_of_the_whitened_product_of_the_projections() -> None:
    """The error of rank r is what the SVD of A^1/2 W_q^T W_k A^1/2 leaves out."""
    x = randn(50, 9)
    Wq, Wk = randn(5, 9, seed=1), randn(5, 9, seed=2)
    A = x.T @ x
    X, Y = score_bases((Wq @ A @ Wq.T)[None], (Wk @ A @ Wk.T)[None])
    root = roots(A)[0]
    values = torch.linalg.svdvals(root @ Wq.T @ Wk @ root)
    error = x @ Wq.T @ (X[0, :, :2] @ Y[0, :, :2].T - torch.eye(5)) @ Wk @ x.T
    torch.testing.assert_close(error.square().sum(), values[2:].square().sum())


def test_errors_of_ranks_are_those_of_the_changed_queries() -> None:
    q, k, g = (randn(60, 2, 4, seed=seed) for seed in range(3))
    moments = ScoreMoments(*(torch.einsum("thd,the->hde", v, v) / 60 for v in (q, k, g)))
    X, Y = score_bases(moments.queries, moments.keys)
    errors = rank_errors(moments, X, Y)
    for head, rank in itertools.product(range(2), range(5)):
        change = Y[head, :, :rank] @ X[head, :, :rank].T - torch.eye(4)
        expected = torch.trace(moments.gradients[head] @ change @ moments.queries[head] @ change.T)
        assert float(errors[head, rank]) >= float(expected) - 1e-9  # a smaller rank may not seem to lose less
        if rank in (0, 4):
            torch.testing.assert_close(errors[head, rank], expected)


def test_ranks_go_where_they_cost_least() -> None:
    """Against all ways to spread the same sum, for curves that fall ever slower."""
    errors = randn(3, 3).abs().sort(-1, descending=True).values.flip(-1).cumsum(-1)
    errors = torch.cat([torch.zeros(3, 1), errors], -1).flip(-1)
    path, sums = rank_path(errors)
    for ranks, total in zip(path.tolist(), sums.tolist(), strict=True):
        ways = [w for w in itertools.product(range(4), repeat=3) if sum(w) == sum(ranks)]
        assert total == pytest.approx(min(sum(float(errors[h, r]) for h, r in enumerate(way)) for way in ways))
        assert total == pytest.approx(sum(float(errors[h, r]) for h, r in enumerate(ranks)))


@pytest.mark.parametrize("own_basis", [False, True])
def test_errors_of_columns_are_those_of_the_best_fit(own_basis: bool) -> None:
    """Heads gone, then columns: the curve against a least-squares fit of what is left."""
    given = curvature()
    whole = damped(given, DAMP)
    way = column_ways([given], order([given], damp=DAMP), 2, own_basis=own_basis, damp=DAMP)[0]
    for count in (1, 3, 6, 8):
        rows = []
        for head, basis, kept in zip(way.heads.tolist(), way.basis, way.kept(count), strict=True):
            values = torch.zeros(len(kept), 12, dtype=torch.float64)
            values[:, 4 * head : 4 * head + 4] = torch.linalg.inv(basis)[kept]
            rows.append(values)
        expected = least_error(whole, torch.cat(rows))
        assert way.error + float(way.order.error[8 - count]) == pytest.approx(expected, rel=1e-6)


def test_the_last_direction_of_a_basis_costs_least() -> None:
    whole = damped(curvature(), DAMP)
    own = in_basis(whole, column_bases(whole))
    B, C = torch.linalg.inv(own.A.matrix), own.W.T @ own.G.matrix @ own.W
    for head in range(3):
        block = slice(4 * head, 4 * head + 4)
        torch.testing.assert_close(B[block, block], torch.eye(4).double(), rtol=1e-6, atol=1e-8)
        costs = C[block, block].diagonal()
        assert costs.tolist() == sorted(costs.tolist(), reverse=True)
        random = torch.linalg.inv(torch.linalg.qr(randn(4, 4, seed=head)).Q)
        values = torch.eye(12).double()
        values[block, block] = random
        kept = [i for i in range(12) if i != 4 * head + 3]
        assert float(costs[-1]) <= least_error(whole, values[kept]) + 1e-9


def test_heads_of_one_size_have_the_errors_of_the_best_fit() -> None:
    given = curvature()
    whole = damped(given, DAMP)
    level = level_way(given, order([given], damp=DAMP)[0], 3, damp=DAMP, step=2)
    inverse = torch.linalg.inv(level.basis)
    expected = least_error(whole, torch.block_diag(*(inverse[head, :2] for head in range(3))))
    assert [kept.tolist() for kept in level.kept(6)] == [[0, 1]] * 3
    assert float(level.order.error[6]) == pytest.approx(expected, rel=1e-6)


def test_heads_that_make_up_for_others_start_from_their_best_fit() -> None:
    whole = damped(curvature(), DAMP)
    left = with_heads(whole, torch.tensor([0, 2]))
    values = torch.eye(12).double()[[0, 1, 2, 3, 8, 9, 10, 11]]
    rest = left.W @ values - whole.W
    assert float(torch.trace(whole.G.matrix @ rest @ whole.A.matrix @ rest.T)) == pytest.approx(
        least_error(whole, values), rel=1e-6
    )


def test_a_kept_basis_computes_the_same() -> None:
    basis, value, weight = randn(4, 4), randn(4, 7, seed=1), randn(6, 4, seed=2)
    rows, columns = kept_values(basis, torch.arange(4), value, weight)
    torch.testing.assert_close(columns @ rows, weight @ value)
    rows, columns = kept_values(basis, torch.tensor([0, 2]), value, weight)
    torch.testing.assert_close(columns @ rows, weight @ basis[:, [0, 2]] @ torch.linalg.inv(basis)[[0, 2]] @ value)


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(measure(model_of("bert"), batches_of(16), method=Finer(polish="off"), samples=64))


def test_whole_heads_are_what_the_library_chooses(study: Study) -> None:
    plan, chooser = study.plan, Chooser(study, Variant())
    for flops in (0.5, 0.2):
        limits = [flops_limit(plan.structure, plan.lengths, flops)]
        expected = plan.method.choose(plan.evidence, plan.structure, limits, multiple_of=8, stages=Stages(None))
        kept = chooser.choose(flops)
        assert [k.units.tolist() for k in kept] == [units.tolist() for units in expected]
        student = chooser.student(kept)
        assert macs(study, student) == pytest.approx(count_macs(student, plan.lengths))


def test_students_hold_what_was_kept_of_every_head(study: Study) -> None:
    """The products of the projections, W_q^T W_k and W_o W_v, against those through the kept dimensions."""
    chooser = Chooser(study, Variant(columns=True, own_basis=True, scores=True))
    columns, rank = torch.tensor([0, 2, 5]), 3
    kept = [Kept(torch.arange(s.units)) for s in study.structure.sublayers]
    for at, number in enumerate(study.attentions):
        way = chooser.ways[-1][at]
        kept[number] = Kept(way.heads, way.basis, [columns] * len(way.heads), [rank] * len(way.heads))
    student = chooser.student(kept)
    for at, number in enumerate(study.attentions):
        dense, small = study.structure.sublayers[number], student.sublayers[number]
        (X, Y), d = study.bases[at], dense.width
        for head in range(dense.units):
            rows = slice(head * d, head * d + d)
            query, key, value = (wide(p.module)[rows] for p in dense.inputs)
            new_query, new_key, new_value = (wide(p.module)[rows] for p in small.inputs)
            scores = query.T @ X[head][:, :rank] @ Y[head][:, :rank].T @ key
            torch.testing.assert_close(new_query.T @ new_key, scores, rtol=1e-4, atol=1e-5)
            T = kept[number].basis[head]  # type: ignore[index]
            through = T[:, columns] @ torch.linalg.inv(T)[columns]
            output, found = (s.weight.detach()[:, rows].double() for s in (dense, small))
            torch.testing.assert_close(found @ new_value, output @ through @ value, rtol=1e-4, atol=1e-5)
    assert sizes(student)[0] == {"heads": 4, "columns": 12, "scores": 12, "filters": 48}


def wide(module: Any) -> Tensor:
    """Weight and bias side by side."""
    return torch.cat([module.weight, module.bias[:, None]], 1).detach().double()


@pytest.mark.parametrize("variant", [v for v in finer.VARIANTS.values() if v.columns or v.scores])
def test_students_hold_their_budget_through_repair_and_polish(study: Study, variant: Variant) -> None:
    chooser = Chooser(study, variant)
    student = chooser.student(chooser.choose(0.3))
    before = sizes(student)
    assert macs(study, student) <= 0.3 * macs(study, study.structure) * (1 + 1e-9)
    repair(study, student)
    polish(study.structure, student, study.plan.sample, 2, share=0.3)
    assert sizes(student) == before
    assert all(p.isfinite().all() for p in structure_of(student.model).model.parameters())
