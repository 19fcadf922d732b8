"""The tiled reference against the oracle: every policy, layout and edge, forward and backward."""

import math

import pytest
import torch
from brute import brute_tiles

from fa4core import Variant, attention
from fa4core.plan.problem import Problem
from fa4core.reference.backward import backward
from fa4core.reference.oracle import oracle
from fa4core.reference.tiled import Call, forward
from primitives import exp, mask, schedule, score, sequence, sink

NEVER = -math.inf


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in drawn]


def results(function, inputs, out_seed=7):
    """Output, LSE, row maximum, and gradients of a fixed weighted sum of the first two."""
    out, lse, row_max = function(*inputs[:3])
    weights = tensors(out.shape, lse.shape, seed=out_seed)
    loss = (out.double() * weights[0]).sum()
    loss = loss + (torch.where(lse == NEVER, 0.0, lse).double() * weights[1]).sum()
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [out, lse, row_max, *grads]


def compare(variant, inputs, *, layout=None, scale=None, atol=1e-10):
    ours = results(
        lambda *t: attention(
            *t, variant, layout=layout, scale=scale, return_lse=True, return_row_max=True
        ),
        inputs,
    )
    theirs = results(lambda *t: oracle(*t, variant, layout=layout, scale=scale), inputs)
    for ours_i, theirs_i in zip(ours, theirs, strict=True):
        if theirs_i is None:
            assert ours_i is None or (ours_i == 0).all()
            continue
        torch.testing.assert_close(ours_i.double(), theirs_i.double(), atol=atol, rtol=0)


def rich(heads, bias_shape=None):
    """A variant that uses everything at once, with the tensors it learns."""
    slopes, logits = tensors((heads,), (heads,), seed=3)
    variant = Variant(
        mask=mask.causal() & mask.sliding_window(150) | mask.sink_tokens(4),
        score=score.define(
            lambda s, b, h, q_idx, kv_idx: 5 * torch.tanh((s + slopes[h] * (kv_idx - q_idx)) / 5)
        ),
        sink=sink.learned(logits),
    )
    return variant, [slopes, logits]


@pytest.mark.parametrize("heads_q, heads_kv", [(2, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("m, n", [(1, 300), (129, 257), (300, 130), (128, 128)])
def test_everything_at_once(heads_q, heads_kv, m, n):
    variant, learned = rich(heads_q)
    inputs = tensors((2, m, heads_q, 8), (2, n, heads_kv, 8), (2, n, heads_kv, 5))
    compare(variant, inputs + learned)


@pytest.mark.parametrize("m, n", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_zero_lengths(m, n, with_sink):
    variant, learned = rich(2) if with_sink else (Variant(mask=mask.causal()), [])
    compare(variant, tensors((2, m, 2, 8), (2, n, 2, 8), (2, n, 2, 8)) + learned)


def test_zero_batch():
    compare(Variant(mask=mask.causal()), tensors((0, 5, 2, 8), (0, 7, 2, 8), (0, 7, 2, 8)))
    packed = sequence.varlen(torch.tensor([0]))
    compare(Variant(), tensors((0, 2, 8), (0, 2, 8), (0, 2, 8)), layout=packed)


def test_masks_by_head_and_by_sequence():
    windows, prefix = torch.tensor([3, 40, 200]), torch.tensor([10, 290])
    by_head = mask.causal() & mask.sliding_window(windows)
    by_sequence = mask.define(lambda b, h, q, k: k < prefix[b])
    inputs = tensors((2, 300, 3, 8), (2, 300, 3, 8), (2, 300, 3, 8))
    compare(Variant(mask=by_head), inputs)
    compare(Variant(mask=by_head | by_sequence), inputs)
    compare(Variant(mask=mask.define(lambda b, h, q, k: (h == 0) & (q == k))), inputs)


def test_learned_tables_indexed_in_every_way():
    table, relative, scalar = tensors((3, 140, 150), (289,), (), seed=4)

    def mod(s, b, h, q_idx, kv_idx):
        twice = table[h, q_idx, kv_idx] + table[2 - h, q_idx, 3] * relative[kv_idx - q_idx - 1]
        return s * scalar + twice

    inputs = tensors((2, 140, 3, 8), (2, 150, 3, 8), (2, 150, 3, 8))
    compare(Variant(score=score.define(mod)), [*inputs, table, relative, scalar])


def test_a_sink_can_be_any_function():
    (table,) = tensors((2, 3, 140), seed=5)
    variant = Variant(mask.causal(), sink=sink.define(lambda b, h, q_idx: table[b, h, q_idx] * 2))
    compare(variant, [*tensors((2, 140, 3, 8), (2, 90, 3, 8), (2, 90, 3, 8)), table])


def test_what_a_mod_gives_where_masked_matters_to_nobody():
    (table,) = tensors((200,), seed=6)
    variant = Variant(
        mask.define(lambda b, h, i, j: i > j),
        score.define(lambda s, b, h, i, j: (1 + s) * torch.log((i - j) * table.exp()[199 + j - i])),
    )
    compare(variant, [*tensors((1, 200, 2, 8), (1, 200, 2, 8), (1, 200, 2, 8)), table])


def test_scores_of_minus_infinity_and_huge_ones():
    inputs = tensors((1, 140, 2, 8), (1, 140, 2, 8), (1, 140, 2, 8))
    cut = score.define(lambda s, b, h, i, j: torch.where(i > j, s, -math.inf))
    compare(Variant(score=cut), inputs)
    compare(Variant(), inputs, scale=300.0, atol=1e-7)
    compare(Variant(score=score.define(lambda s, b, h, i, j: s + 1e4)), inputs, atol=1e-8)


# ------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("used", [False, True])
def test_packed(used):
    variant, learned = rich(4)
    inputs = tensors((300, 4, 8), (340, 2, 8), (340, 2, 8))
    cu_q, cu_k = torch.tensor([0, 140, 140, 150, 290]), torch.tensor([0, 150, 170, 170, 320])
    more = {}
    if used:
        more = {
            "seqused_q": torch.tensor([130, 0, 10, 0]),
            "seqused_k": torch.tensor([150, 3, 0, 7]),
        }
    compare(variant, inputs + learned, layout=sequence.varlen(cu_q, cu_k, **more))


@pytest.mark.parametrize("packed_queries", [False, True])
def test_pages_shared_and_in_any_order(packed_queries):
    variant, learned = rich(4)
    table = torch.tensor([[7, 2, 5, 1], [7, 2, 0, 4]], dtype=torch.int32)  # a shared prefix
    used = torch.tensor([200, 130], dtype=torch.int32)
    shape = (9, 4, 8) if packed_queries else (2, 9, 4, 8)
    cu = torch.tensor([0, 3, 9]) if packed_queries else None
    inputs = tensors(shape, (8, 64, 2, 8), (8, 64, 2, 5))
    compare(variant, inputs + learned, layout=sequence.paged(table, used, cu_seqlens_q=cu))


def test_nan_behind_the_lengths_reaches_nothing():
    variant, _ = rich(2)
    q, k, v = (t.detach() for t in tensors((2, 200, 2, 8), (2, 200, 2, 8), (2, 200, 2, 8)))
    used = torch.tensor([150, 70])
    layout = sequence.fixed(used, used)
    clean = results(
        lambda *t: attention(*t, variant, layout=layout, return_lse=True, return_row_max=True),
        [t.clone().requires_grad_() for t in (q, k, v)],
    )
    for t in (q, k, v):
        t[0, 150:], t[1, 70:] = math.nan, math.inf
    dirty = results(
        lambda *t: attention(*t, variant, layout=layout, return_lse=True, return_row_max=True),
        [t.clone().requires_grad_() for t in (q, k, v)],
    )
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)


def test_nan_that_is_attended_to_is_seen():
    q, k, v = (t.detach() for t in tensors((1, 200, 1, 8), (1, 200, 1, 8), (1, 200, 1, 8)))
    k[0, 150] = math.nan
    out = attention(q, k, v, Variant(mask=mask.causal()))
    assert out[:, :150].isfinite().all() and out[:, 150:].isnan().all()


@pytest.mark.parametrize(
    "strided",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t[:, :1].expand_as(t),
        lambda t: torch.cat([t.flatten(), t.new_zeros(1)])[1:].view_as(t),
    ],
    ids=["transposed", "sliced", "every second", "expanded", "misaligned"],
)
def test_any_strides(strided):
    variant, learned = rich(2)
    q, k, v = (strided(t.detach()) for t in tensors((2, 140, 2, 8), *[(2, 140, 2, 8)] * 2))
    compare(variant, [t.requires_grad_() for t in (q, k, v)] + learned)


# ----------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("splits", [2, 3, 50])
def test_split_keys_are_combined(splits):
    variant, learned = rich(2)
    split = Variant(variant.mask, variant.score, variant.sink, schedule=schedule.split_kv(splits))
    compare(split, tensors((2, 3, 2, 8), (2, 700, 2, 8), (2, 700, 2, 8)) + learned)


@pytest.mark.parametrize("threshold", [0.0, 3.0, 8.0, 60.0])
def test_a_late_rescale_changes_roundings_only(threshold):
    variant = Variant(
        score=score.define(lambda s, b, h, q_idx, kv_idx: s + kv_idx / 10),
        rescale_threshold=threshold,
    )
    compare(variant, tensors((1, 5, 2, 8), (1, 700, 2, 8), (1, 700, 2, 8)))


def test_the_rescale_threshold_is_honoured():
    """P may exceed 1 by 2^threshold and no more: seen where half precision would overflow."""
    from fa4core.reference.softmax import OnlineSoftmax

    state = OnlineSoftmax.start((1, 1, 1), torch.zeros(()), exp.hardware(), 8.0, torch.float32)
    value, key = torch.ones(1, 1, 1), torch.zeros(1, dtype=torch.int64)
    for score_, applied in ((1.0, 1.0), (9.0, 1.0), (9.5, 9.5), (2.0, 9.5)):
        state.update(torch.tensor([[[score_]]]), value, key)
        assert state.applied.item() == applied
    expected = math.log(sum(2.0**x for x in (1.0, 9.0, 9.5, 2.0)))
    assert state.finish().lse.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("degree, bound", [(0, 0.4), (1, 0.05), (2, 3e-3), (3, 2e-4), (6, 1e-6)])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_an_exp_policy_costs_its_error_and_no_more(degree, bound, fraction):
    q, k, v = (t.detach().float() for t in tensors((1, 200, 2, 16), *[(1, 200, 2, 16)] * 2))
    exact = attention(q, k, v, Variant(mask=mask.causal()))
    policy = exp.Exp(degree, fraction)
    out = attention(q, k, v, Variant(mask=mask.causal(), exp=policy))
    error = (out - exact).abs().max() / v.abs().max()
    assert error < 2 * bound
    assert degree == 6 or error > bound / 1000  # the policy is applied at all


def test_the_exp_policy_does_not_depend_on_how_tiles_are_merged(monkeypatch):
    from fa4core.reference import work

    q, k, v = (t.detach().float() for t in tensors((1, 300, 2, 16), *[(1, 300, 2, 16)] * 2))
    variant = Variant(mask=mask.causal(), exp=exp.mixed(1, 0.25))
    wide = attention(q, k, v, variant)
    exact = attention(q, k, v, Variant(mask=mask.causal(), exp=exp.hardware()))
    monkeypatch.setattr(work, "MAX_SCORES", 1)
    narrow = attention(q, k, v, variant)
    # Maxima are others, and so is each polynomial's error; which keys it computes is not.
    assert (narrow - wide).square().mean() < (wide - exact).square().mean() / 8


# ------------------------------------------------------------------------------ what it is made of


@pytest.mark.parametrize("tile_q, tile_k", [(16, 16), (64, 128), (128, 32)])
@pytest.mark.parametrize("most", [1, 1 << 14])
def test_any_tile_size_and_any_chunk_gives_the_same(tile_q, tile_k, most, monkeypatch):
    from fa4core.reference import work

    monkeypatch.setattr(work, "MAX_SCORES", most)
    variant, _ = rich(4)
    q, k, v = (t.detach() for t in tensors((2, 150, 4, 8), (2, 170, 2, 8), (2, 170, 2, 8)))
    problem = Problem.from_tensors(q, k, v)
    tiles = brute_tiles(
        variant.graph.mask,
        batch=2,
        heads=4,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
        tile_q=tile_q,
        tile_k=tile_k,
    )
    call = Call(variant.program, problem, lambda: tiles, None, 8**-0.5, tile_q, tile_k)
    out, lse, _ = forward(call, q, k, v)
    expected = oracle(q, k, v, variant)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
    weight = torch.randn_like(out)
    got = backward(call, q, k, v, out, lse, weight, None)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(oracle(*inputs, variant)[0], inputs, weight)
    torch.testing.assert_close((got.q, got.k, got.v), wanted)


def test_empty_tiles_are_skipped_and_full_ones_need_no_mask(monkeypatch):
    from fa4core.reference import work

    seen = []
    original = work.evaluate

    def counting(roots, variables, *args, **kwargs):
        seen.append(variables["q"].numel() * variables["k"].numel())
        return original(roots, variables, *args, **kwargs)

    monkeypatch.setattr(work, "evaluate", counting)
    q, k, v = tensors((1, 1024, 1, 8), (1, 1024, 1, 8), (1, 1024, 1, 8))
    attention(q, k, v, Variant(mask=mask.causal()))
    assert seen == [128 * 128] * 8  # the diagonal, once each


def test_p_is_rounded_to_the_inputs_dtype():
    """As tensor cores take it, after it was summed: weights 1, p and p, with values 0, 1 and 1."""
    q, k, v = (torch.zeros(1, n, 1, 16, dtype=torch.bfloat16) for n in (1, 3, 3))
    q[..., 0], k[0, 1:, 0, 0], v[0, 1:, 0, 0] = 1.0, 1.0, 1.0
    p = torch.exp(torch.tensor(-0.6))
    rounded = (2 * p.bfloat16().float() / (1 + 2 * p)).bfloat16()
    assert rounded != (2 * p / (1 + 2 * p)).bfloat16()  # the rounding can be seen here
    assert attention(q, k, v, scale=-0.6)[0, 0, 0, 0] == rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_the_same_bit_by_bit(dtype):
    variant, learned = rich(6)
    inputs = tensors((2, 300, 6, 16), (2, 300, 2, 16), (2, 300, 2, 16), dtype=dtype) + learned

    def once():
        return results(
            lambda *t: attention(*t, variant, return_lse=True, return_row_max=True), inputs
        )

    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


def test_without_query_heads_gradients_are_zero():
    variant = Variant(mask=mask.causal(), sink=sink.learned(torch.zeros(0, requires_grad=True)))
    q, k, v = tensors((1, 5, 0, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    attention(q, k, v, variant).sum().backward()
    assert q.grad.shape == q.shape
    assert not k.grad.any()
    assert not v.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_of_any_magnitude_have_finite_gradients(dtype):
    """Weights are made of LSEs; where the accumulator is too coarse for that, of nothing."""
    for size in (1e2, 1e3, 1e4) if dtype == torch.float16 else (1e2, 1e5, 1e9, 1e17):
        q, k, v = tensors((1, 40, 2, 16), (1, 40, 1, 16), (1, 40, 1, 16), dtype=dtype)
        with torch.no_grad():
            q.mul_(size)
            k.mul_(size)
        out, lse = attention(q, k, v, Variant(mask=mask.causal()), scale=0.3, return_lse=True)
        found = torch.autograd.grad(out.sin().sum() + lse.sin().sum(), (q, k, v))
        assert all(gradient.isfinite().all() for gradient in found), size
