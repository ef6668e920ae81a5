from __future__ import annotations

import pytest
import torch

from shearling.surgeon.damped import damped_factor


@pytest.mark.parametrize("damp", [0.0, 1e-2, 1e6])
def test_every_finite_matrix_gets_a_factor(damp: float) -> None:
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(3, 8, 2, generator=generator, dtype=torch.float64)
    singular = thin @ thin.mT
    matrices = torch.cat([singular, torch.zeros(1, 8, 8).double(), singular[:1] - 1e-3 * torch.eye(8).double()])
    damped = matrices.clone()
    factor = damped_factor(damped, damp)
    torch.testing.assert_close(factor @ factor.mT, damped, rtol=1e-9, atol=1e-12)
    added = (damped - matrices).diagonal(dim1=1, dim2=2)
    assert bool((added >= 0).all())
    assert bool((damped - matrices - torch.diag_embed(added)).abs().max() == 0)  # nothing but the diagonal
    if damp == 0:
        assert float(added[:3].max()) < 1e-9  # no more than rounding asks for


def test_no_more_damping_than_asked_where_it_is_enough() -> None:
    matrix = torch.eye(4, dtype=torch.float64)[None] * 2
    factor = damped_factor(matrix.clone(), 0.5)
    torch.testing.assert_close(factor[0], torch.eye(4, dtype=torch.float64) * 3**0.5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_ends_too(value: float) -> None:
    with pytest.raises(ArithmeticError, match="not finite"):
        damped_factor(torch.full((1, 3, 3), value, dtype=torch.float64), 0.0)
