"""The oracle against torch's own attention, and the edges that torch has no answer for."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fa4core import Variant
from fa4core.reference.oracle import oracle
from primitives import mask, score, sequence, sink

NEVER = -math.inf


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def sdpa(q, k, v, **options):
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(*heads_first, enable_gqa=True, **options).transpose(1, 2)


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -1.0])
def test_full_attention_is_torchs(scale):
    q, k, v = tensors((2, 9, 6, 8), (2, 13, 2, 8), (2, 13, 2, 5))
    out, lse, row_max = oracle(q, k, v, scale=scale)
    torch.testing.assert_close(out, sdpa(q, k, v, scale=scale), atol=1e-12, rtol=0)
    factor = 8**-0.5 if scale is None else scale
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(3, 2)) * factor
    torch.testing.assert_close(lse, s.logsumexp(-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(row_max, s.amax(-1), atol=1e-12, rtol=0)


def test_masks_and_mods_are_torchs_attn_mask():
    q, k, v = tensors((2, 9, 4, 8), (2, 13, 4, 8), (2, 13, 4, 5))
    bias, allowed = tensors((4, 9, 13))[0], torch.arange(9)[:, None] + 4 >= torch.arange(13)
    variant = Variant(mask.causal(), score.define(lambda s, b, h, i, j: s + bias[h, i, j]))
    expected = sdpa(q, k, v, attn_mask=bias.masked_fill(~allowed, NEVER))
    torch.testing.assert_close(oracle(q, k, v, variant)[0], expected, atol=1e-12, rtol=0)


def test_gradients_are_torchs():
    q, k, v, bias = (t.requires_grad_() for t in tensors((1, 7, 2, 4), *[(1, 7, 2, 4)] * 2, (7, 7)))
    variant = Variant(score=score.define(lambda s, b, h, i, j: s + bias[i, j]))
    (weight,) = tensors((1, 7, 2, 4), seed=1)
    ours = torch.autograd.grad(oracle(q, k, v, variant)[0], [q, k, v, bias], weight)
    theirs = torch.autograd.grad(sdpa(q, k, v, attn_mask=bias), [q, k, v, bias], weight)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_a_row_with_nothing_to_attend_to():
    q, k, v = (t.requires_grad_() for t in tensors((1, 6, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4)))
    out, lse, row_max = oracle(q, k, v, Variant(mask.causal()))  # three queries before any key
    assert (out[:, :3] == 0).all() and (lse[..., :3] == NEVER).all()
    assert (row_max[..., :3] == NEVER).all() and lse[..., 3:].isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse[..., 3:].sum(), [q, k, v])
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :3] == 0).all()


def test_a_sink_takes_its_share_and_is_an_empty_rows_lse():
    q, k, v = tensors((1, 6, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4))
    logits = torch.tensor([0.5, -2.0], dtype=torch.float64)
    plain, plain_lse, _ = oracle(q, k, v, Variant(mask.causal()))
    out, lse, row_max = oracle(q, k, v, Variant(mask.causal(), sink=sink.learned(logits)))
    expected = torch.logaddexp(plain_lse, logits[:, None])
    torch.testing.assert_close(lse, expected)
    share = torch.exp(plain_lse - expected).transpose(1, 2)[..., None]
    torch.testing.assert_close(out, plain * share)
    assert (row_max[..., :3] == NEVER).all()


def test_what_a_mod_gives_where_masked_matters_to_nobody():
    q, k, v = (t.requires_grad_() for t in tensors((1, 5, 1, 4), (1, 5, 1, 4), (1, 5, 1, 4)))
    table = torch.ones(5, dtype=torch.float64, requires_grad=True)
    # NaN on and above the diagonal, and an index outside the table there, too.
    variant = Variant(
        mask.define(lambda b, h, i, j: i > j),
        score.define(lambda s, b, h, i, j: s + torch.log((i - j) * table[4 + j - i])),
    )
    out, lse, _ = oracle(q, k, v, variant)
    grads = torch.autograd.grad(out.sum() + lse[..., 1:].sum(), [q, k, v, table])
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_a_score_of_minus_infinity_is_not_attended_to():
    q, k, v = tensors((1, 5, 1, 4), (1, 5, 1, 4), (1, 5, 1, 4))
    by_mask = oracle(q, k, v, Variant(mask.define(lambda b, h, i, j: i > j)))
    cut = score.define(lambda s, b, h, i, j: torch.where(i > j, s, -math.inf))
    for a, b in zip(by_mask, oracle(q, k, v, Variant(score=cut)), strict=True):
        torch.testing.assert_close(a, b)


LENGTHS_Q, LENGTHS_K = (4, 0, 7), (5, 3, 6)


def _parts(q, k, v, variant):
    """Each sequence by itself; the variants of these tests don't use `b`."""
    parts, at_q, at_k = [], 0, 0
    for m, n in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        one = (q[None, at_q : at_q + m], k[None, at_k : at_k + n], v[None, at_k : at_k + n])
        parts.append(oracle(*one, variant))
        at_q, at_k = at_q + m, at_k + n
    return parts


def test_packed_sequences_are_sequences_by_themselves():
    variant = Variant(mask.causal() & mask.sliding_window(3))
    q, k, v = tensors((11, 4, 8), (14, 2, 8), (14, 2, 8))
    layout = sequence.varlen(torch.tensor([0, 4, 4, 11]), torch.tensor([0, 5, 8, 14]))
    out, lse, row_max = oracle(q, k, v, variant, layout=layout)
    parts = _parts(q, k, v, variant)
    torch.testing.assert_close(out, torch.cat([p[0][0] for p in parts]))
    torch.testing.assert_close(lse, torch.cat([p[1][0] for p in parts], -1))
    torch.testing.assert_close(row_max, torch.cat([p[2][0] for p in parts], -1))


def test_pages_and_padding_hold_the_same_sequences():
    variant = Variant(mask.causal())
    q, k, v = tensors((3, 7, 4, 8), (3, 8, 2, 8), (3, 8, 2, 8))
    used_q, used_k = torch.tensor(LENGTHS_Q), torch.tensor(LENGTHS_K)
    padded = oracle(q, k, v, variant, layout=sequence.fixed(used_q, used_k))
    table = torch.tensor([[3, 0], [5, 5], [1, 4]])
    pages_k, pages_v = torch.full((2, 6, 4, 2, 8), math.nan, dtype=torch.float64)
    for b in range(3):
        for i in range(2 if LENGTHS_K[b] > 4 else 1):
            pages_k[table[b, i]] = k[b, 4 * i : 4 * i + 4]
            pages_v[table[b, i]] = v[b, 4 * i : 4 * i + 4]
    layout = sequence.paged(table, used_k, seqused_q=used_q)
    for a, b in zip(padded, oracle(q, pages_k, pages_v, variant, layout=layout), strict=True):
        torch.testing.assert_close(a, b)
    out, lse, _ = padded
    assert (out[1] == 0).all() and (lse[1] == NEVER).all() and (out[0, 4:] == 0).all()
