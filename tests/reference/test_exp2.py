"""exp2 by polynomial has the error that the table says, and its edges are right."""

import pytest
import torch

from fa4core.reference.exp2 import MAX_ERROR, emulated, exp2, polynomial_exp2
from primitives import exp

X = torch.linspace(-20, 8, 100_001, dtype=torch.float64)


def relative(got, x):
    return (got.double() / torch.exp2(x.double()) - 1).abs().max().item()


@pytest.mark.parametrize("degree", range(7))
def test_the_documented_error_is_the_measured_one(degree):
    in_float64 = relative(polynomial_exp2(X, degree), X)
    assert 0.98 * MAX_ERROR[degree] <= in_float64 <= 1.01 * MAX_ERROR[degree]
    x = X.float()
    assert relative(polynomial_exp2(x, degree), x) <= 1.01 * MAX_ERROR[degree] + 1.8e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("degree", [0, 3, 6])
def test_edges(dtype, degree):
    x = torch.tensor([-float("inf"), -1e30, -127.5, -126.0, -1.0, 0.0, 1.0, 8.0], dtype=dtype)
    got = polynomial_exp2(x, degree)
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert got[3:].tolist() == [2.0**-126, 0.5, 1.0, 2.0, 256.0]
    assert polynomial_exp2(torch.tensor([float("nan")], dtype=dtype), degree).isnan().all()


@pytest.mark.parametrize("fraction, count", [(0.125, 16), (0.25, 32), (0.75, 96), (0.1, 12)])
def test_a_fraction_is_spread_evenly_and_does_not_depend_on_tiles(fraction, count):
    keys = torch.arange(128)
    chosen = emulated(keys, fraction)
    assert chosen.sum() == count
    assert torch.equal(chosen[50:], emulated(keys[50:], fraction))
    pairs = chosen.view(64, 2)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    gaps = pairs[:, 0].nonzero().diff(dim=0)
    assert gaps.max() - gaps.min() <= 1
    assert [emulated(k, fraction) for k in range(128)] == chosen.tolist()


def test_a_mix_emulates_exactly_its_share():
    x, keys = torch.randn(2, 3, 64), torch.arange(64)
    chosen = emulated(keys, 0.25)
    got = exp2(x.clone(), exp.mixed(1, 0.25), keys)
    assert torch.equal(got[..., ~chosen], torch.exp2(x[..., ~chosen]))
    assert torch.equal(got[..., chosen], polynomial_exp2(x[..., chosen], 1))
    assert torch.equal(exp2(x.clone(), exp.hardware(), keys), torch.exp2(x))
    assert torch.equal(exp2(x.clone(), exp.polynomial(2), keys), polynomial_exp2(x, 2))
