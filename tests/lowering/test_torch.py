"""Graphs evaluated by torch give what the function gives, or an error that names the place."""

import pytest
import torch

from fa4core.lowering.torch import evaluate
from primitives import mask, score

INDICES = {
    "b": torch.tensor(1),
    "h": torch.arange(3)[:, None, None],
    "q": torch.arange(5)[:, None],
    "k": torch.arange(7),
}
TABLE = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))


def by_hand(function, value):
    """The function called at every index by itself."""
    out = torch.empty(3, 5, 7, dtype=torch.float64)
    for h in range(3):
        for q in range(5):
            for k in range(7):
                t = [torch.tensor(x) for x in (1, h, q, k)]
                out[h, q, k] = function(value[h, q, k], *t)
    return out


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s * 2 - q // 2 + (k - 3) % 4,
        lambda s, b, h, q, k: torch.where(q >= k, s.abs(), -s) + TABLE[h, q + k].double(),
        lambda s, b, h, q, k: torch.tanh(s / 3) * 3 + torch.sigmoid(s) + torch.rsqrt(s * s + 1),
        lambda s, b, h, q, k: torch.exp(s.clamp(-1, 1)) + torch.erf(s) + torch.log1p(s.abs()),
        lambda s, b, h, q, k: s * ((q ^ k) & 3) + (q | 4) + ((q < k) ^ (k > 2)),
        lambda s, b, h, q, k: torch.maximum(s, -s) ** 1.5 + torch.minimum(q, k) * s.floor(),
        lambda s, b, h, q, k: s + TABLE[h][-1 - q] - TABLE[1, k * b],
        lambda s, b, h, q, k: torch.atan2(s, s.cos()) + s.sin() - s.trunc() + s.sign() * q * k * h,
    ],
)
def test_a_graph_computes_what_its_function_computes(function):
    value = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mod = score.define(function)
    (got,) = evaluate([mod.expr], INDICES | {"score": value}, dtype=torch.float64)
    torch.testing.assert_close(got.expand(3, 5, 7), by_hand(function, value), atol=1e-12, rtol=0)


def test_a_node_stays_as_small_as_what_it_depends_on():
    (by_query,) = evaluate([mask.define(lambda b, h, q, k: q % 2 == 0).expr], INDICES)
    assert by_query.shape == (5, 1) and by_query.dtype == torch.bool
    (constant,) = evaluate([mask.full().expr], INDICES)
    assert constant.shape == ()


def test_an_index_outside_names_the_tensor_the_dimension_and_the_range():
    mod = score.define(lambda s, b, h, q, k: s + TABLE[h, q + 2 * k])
    with pytest.raises(IndexError, match=r"dimension 1 .*\(3, 11\).* size 11.*11\.\.16"):
        evaluate([mod.expr], INDICES | {"score": torch.zeros(3, 5, 7)})


def test_where_nothing_is_attended_to_an_index_may_be_outside():
    mod = score.define(lambda s, b, h, q, k: s + TABLE[h, q + 2 * k])
    live = INDICES["q"] + 2 * INDICES["k"] < 11
    variables = INDICES | {"score": torch.zeros(3, 5, 7)}
    (got,) = evaluate([mod.expr], variables, live=live)
    expected = TABLE[INDICES["h"], (INDICES["q"] + 2 * INDICES["k"]).clamp(max=10)]
    assert torch.equal(got[:, live], expected[:, live])
    with pytest.raises(IndexError, match=r"11\.\.11"):
        evaluate([mod.expr], variables, live=INDICES["q"] + 2 * INDICES["k"] < 12)


def test_an_empty_tensor_can_be_read_by_nobody():
    nothing = torch.zeros(0)
    mod = score.define(lambda s, b, h, q, k: s + nothing[q])
    variables = INDICES | {"score": torch.zeros(3, 5, 7)}
    with pytest.raises(IndexError, match="size 0"):
        evaluate([mod.expr], variables)
    (got,) = evaluate([mod.expr], variables, live=torch.tensor(False))
    assert got.shape == (3, 5, 7)


def test_division_of_integers_by_zero_says_so():
    with pytest.raises(ZeroDivisionError, match="divides an integer by zero"):
        evaluate([mask.define(lambda b, h, q, k: 4 // q > k).expr], INDICES)


def test_placeholders_need_their_tensors():
    from primitives.expr import captures, dump, parse

    expr = score.define(lambda s, b, h, q, k: s + TABLE[h, q]).expr
    (read,) = parse(dump([expr]))
    variables = INDICES | {"score": torch.zeros(3, 5, 7)}
    with pytest.raises(ValueError, match="placeholder"):
        evaluate([read], variables)
    (got,) = evaluate([read], variables, {captures(read)[0]: TABLE})
    assert torch.equal(got, evaluate([expr], variables)[0])
