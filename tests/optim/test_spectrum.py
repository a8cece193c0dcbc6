"""Is the exponent the one WeightWatcher fits, for every layer at once, and undefined where it should be?"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vestige.optim.spectral import tail_exponent


def literal(values: np.ndarray) -> float:
    """The fit as WeightWatcher defines it, one candidate and one point at a time."""
    x, (best, found) = np.sort(values), (math.inf, math.nan)
    for i in range(len(x) - 1):
        n = len(x) - i
        alpha = 1 + n / (np.log(x[i:]).sum() - n * np.log(x[i]))
        distance = max(abs(1 - (x[i + k] / x[i]) ** (1 - alpha) - k / n) for k in range(n))
        if distance < best:
            best, found = distance, alpha
    return found


def squared_singular_values(matrix: Tensor) -> np.ndarray:
    return torch.linalg.svdvals(matrix.double()).square().numpy()


def heavy(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(rows, 1, generator=generator).add(0.01).pow(-0.7)
    return torch.randn(rows, columns, generator=generator) * scales


def diagonal(values: Tensor) -> Tensor:
    """A matrix whose squared singular values are the given ones."""
    return torch.diag(values.double().sqrt())


@settings(deadline=None, max_examples=15)
@given(st.integers(10, 70), st.integers(10, 70), st.integers(0, 10**6))
def test_equals_the_literal_loop(rows, columns, seed):
    weight = heavy(rows, columns, seed)
    values = squared_singular_values(weight)
    assume((values > tail_exponent.FLOOR).sum() >= tail_exponent.FEWEST)  # with fewer there is none
    assert tail_exponent.exponent(weight) == pytest.approx(literal(values[values > tail_exponent.FLOOR]), rel=1e-6)


def test_long_spectra_are_pruned_without_changing_the_answer():
    generator = torch.Generator().manual_seed(1)
    for shape in (0.5, 1.0, 2.0, 4.0):
        values = torch.rand(700, generator=generator, dtype=torch.float64).pow(-1 / shape)
        values[:200] *= torch.rand(200, generator=generator, dtype=torch.float64)  # a body that is no power law
        found = tail_exponent._fit(values.sort().values[None], 0.0).item()
        assert found == pytest.approx(literal(values.numpy()), rel=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:powerlaw")
def test_equals_the_powerlaw_package():
    powerlaw = pytest.importorskip("powerlaw", reason="powerlaw is a development dependency")
    for seed in range(4):
        weight = heavy(60, 90, seed)
        fit = powerlaw.Fit(squared_singular_values(weight), verbose=False)
        assert tail_exponent.exponent(weight) == pytest.approx(fit.power_law.alpha, rel=1e-6)


def test_equals_weightwatcher():
    fits = pytest.importorskip("weightwatcher.WW_powerlaw", reason="weightwatcher is not installed")
    for seed in range(4):
        weight = heavy(40, 64, seed)
        fit = fits.WWFit(squared_singular_values(weight))
        assert tail_exponent.exponent(weight) == pytest.approx(fit.alpha, rel=1e-6)


@pytest.mark.parametrize("density", [2.0, 3.0, 5.0])
def test_recovers_a_pareto_exponent(density):
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(4000, generator=generator, dtype=torch.float64).pow(-1 / (density - 1))
    found = tail_exponent._fit(values.sort().values[None], tail_exponent.FLOOR).item()
    assert found == pytest.approx(density, rel=0.04)


def test_is_invariant_to_scale_permutation_transposition_and_rotation():
    weight = heavy(48, 80, 5)
    expected = tail_exponent.exponent(weight)
    rotation = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(6)).double()).Q
    order = torch.randperm(80, generator=torch.Generator().manual_seed(7))
    for same in (weight * 16, weight / 4, weight[:, order], weight.flip(0), weight.T, rotation @ weight.double()):
        assert tail_exponent.exponent(same) == pytest.approx(expected, rel=1e-5)


def test_layers_together_equal_layers_alone():
    weights = [
        heavy(rows, columns, rows) for rows, columns in ((12, 30), (64, 27), (100, 40), (40, 100), (10, 512), (5, 9))
    ]
    weights.append(torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0)))
    for convention in ("flatten", "per-position"):
        together = tail_exponent.exponents(weights, convention)
        alone = torch.tensor([tail_exponent.exponent(weight, convention) for weight in weights], dtype=torch.float64)
        torch.testing.assert_close(together, alone, equal_nan=True, rtol=1e-9, atol=0)


def test_conventions_for_convolutions():
    weight = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    flat = squared_singular_values(weight.flatten(1))
    pooled = np.concatenate([squared_singular_values(weight[:, :, i, j]) for i in range(3) for j in range(3)])
    matrix = heavy(20, 30, 1)

    def spectra(convention):
        matrices = [tail_exponent._matrices(each, convention) for each in (weight, matrix)]
        return tail_exponent._spectra(matrices, tail_exponent._by_size(matrices), False)

    as_one, as_matrix = spectra("flatten")
    by_position, as_it_is = spectra("per-position")
    np.testing.assert_allclose(as_one.numpy(), np.sort(flat), rtol=1e-9)
    np.testing.assert_allclose(by_position.numpy(), np.sort(pooled), rtol=1e-6)
    assert torch.equal(as_matrix, as_it_is)


@pytest.mark.parametrize(
    "weight",
    [
        heavy(9, 500, 0),
        torch.zeros(20, 20),
        torch.eye(20),
        torch.linalg.qr(heavy(30, 30, 0)).Q,
        torch.full((20, 30), 3.0),
        torch.full((20, 20), torch.nan),
        heavy(20, 20, 0) * 1e-6,
        torch.where(torch.eye(20) > 0, torch.inf, heavy(20, 20, 1)),
    ],
    ids=["few", "zero", "identity", "orthogonal", "rank one", "nan", "below the cut", "infinite"],
)
def test_small_or_degenerate_spectra_are_undefined(weight):
    assert math.isnan(tail_exponent.exponent(weight))
    beside = tail_exponent.exponents([weight, heavy(30, 40, 2)])
    assert beside[0].isnan()
    assert beside[1].item() == pytest.approx(tail_exponent.exponent(heavy(30, 40, 2)))


def test_the_cut_is_an_argument():
    values = torch.logspace(-8, 0, 40)
    assert tail_exponent.exponent(diagonal(values)) == pytest.approx(literal(values[values > 1e-5].numpy()), rel=1e-4)
    assert tail_exponent.exponent(diagonal(values), floor=0.0) == pytest.approx(literal(values.numpy()), rel=1e-4)
    assert tail_exponent.exponent(diagonal(values) * 1e3, floor=10.0) == pytest.approx(
        tail_exponent.exponent(diagonal(values)), rel=1e-6
    )


def test_repeated_eigenvalues():
    values = torch.cat([torch.full((8,), 1.0), torch.full((4,), 2.0), torch.tensor([3.0, 5.0, 8.0, 30.0])])
    assert math.isfinite(tail_exponent.exponent(diagonal(values)))


def test_parameters_are_left_alone_and_nothing_is_nothing():
    weight = torch.nn.Parameter(heavy(20, 20, 0))
    before = weight.detach().clone()
    assert not tail_exponent.exponents([weight]).requires_grad
    assert torch.equal(weight, before)
    assert tail_exponent.exponents([]).shape == (0,)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        tail_exponent.exponent(torch.zeros(5))
    with pytest.raises(ValueError, match="convention='other'"):
        tail_exponent.exponents([torch.zeros(5, 5)], "other")
