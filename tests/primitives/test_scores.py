"""Every prebuilt score mod against its formula, its gradients against torch's autograd."""

from __future__ import annotations

import math

import pytest
import torch
from evaluation import evaluate, grid

from primitives import parameter, score

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 5, 7
SIZES = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
INDICES = grid(SEQLEN_Q, SEQLEN_K, BATCH, HEADS)
B, H, Q, K = (INDICES[n] for n in "bhqk")
PLACE = Q + SEQLEN_K - SEQLEN_Q  # of a query, among the keys
SCORES = torch.randn(SIZES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def learned(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def integers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(3))


def t5_bucket_as_published(relative, bidirectional, buckets, most):
    """The bucket of a distance as T5's paper and code describe it, one number at a time."""
    bucket, distance = 0, -relative
    if bidirectional:
        buckets //= 2
        bucket = buckets if relative > 0 else 0
        distance = abs(relative)
    distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    far = exact + int(math.log(distance / exact) / math.log(most / exact) * (buckets - exact))
    return bucket + min(far, buckets - 1)


SLOPES, SLOPES2, TABLE, TABLE2 = learned(4), learned(2, 4), learned(5), learned(4, 9)
T5, POSITIVE = learned(8, 4), learned(4).detach().abs().add(0.1).requires_grad_()
DENSE2, DENSE3, DENSE4, DENSE1 = (
    learned(5, 7),
    learned(4, 5, 7),
    learned(2, 4, 5, 7),
    learned(1, 4, 5, 7),
)
GATES, PER_QUERY = learned(2, 4, 7), learned(2, 5)
SPATIAL, EDGE = learned(4, 3), learned(4, 2, 3)
DISTANCES, TYPES, PATH = integers(3, 2, 7, 7), integers(3, 2, 7, 7, 2), integers(3, 2, 7, 7)
SCALAR = learned()


def clipped(reach):
    return (K - PLACE).clamp(-reach, reach) + reach


def t5(bidirectional, most=6):
    rows = [
        [t5_bucket_as_published(k - q - 2, bidirectional, 8, most) for k in range(SEQLEN_K)]
        for q in range(SEQLEN_Q)
    ]
    return torch.tensor(rows)[None, None]


def edge_bias(table):
    length = PATH[B, Q, K]
    terms = [torch.where(length > n, table[H, n, TYPES[B, Q, K, n]], 0.0) for n in range(2)]
    return sum(terms) / length.clamp(min=1)


FREQUENCIES = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
CASES = {
    "alibi": (score.alibi(SLOPES), lambda s: s - SLOPES[H] * (PLACE - K).abs(), [SLOPES]),
    "alibi batch": (
        score.alibi(SLOPES2),
        lambda s: s - SLOPES2[B, H] * (PLACE - K).abs(),
        [SLOPES2],
    ),
    "alibi top left": (
        score.alibi(SLOPES, "top_left"),
        lambda s: s - SLOPES[H] * (Q - K).abs(),
        [SLOPES],
    ),
    "alibi default": (score.alibi(4), lambda s: s - 4.0 ** -(H + 1.0) * (PLACE - K).abs(), []),
    "decay": (
        score.decay(POSITIVE),
        lambda s: s + (PLACE - K).abs() * POSITIVE[H].log(),
        [POSITIVE],
    ),
    "decay default": (
        score.decay(4),
        lambda s: s + (PLACE - K).abs() * (1 - 2.0 ** (-5.0 - H)).log(),
        [],
    ),
    "relative": (score.relative_bias(TABLE), lambda s: s + TABLE[clipped(2)], [TABLE]),
    "relative heads": (score.relative_bias(TABLE2), lambda s: s + TABLE2[H, clipped(4)], [TABLE2]),
    "t5": (score.t5_bias(T5, max_distance=6), lambda s: s + T5[t5(True), H], [T5]),
    "t5 decoder": (
        score.t5_bias(T5, bidirectional=False, max_distance=6),
        lambda s: s + T5[t5(False), H],
        [T5],
    ),
    "sandwich": (
        score.sandwich(4, 7, 16),
        lambda s: (
            s + 4 / (8 * (H + 1.0)) * ((PLACE - K).abs()[..., None] * FREQUENCIES).cos().sum(-1)
        ),
        [],
    ),
    "llama4": (
        score.llama4_temperature(3.0, 0.5),
        lambda s: s * (1 + 0.5 * torch.log(1.0 + (PLACE + 1) // 3)),
        [],
    ),
    "ssmax": (score.ssmax(SLOPES), lambda s: s * SLOPES[H] * (PLACE + 1.0).log(), [SLOPES]),
    "ssmax all": (score.ssmax(SCALAR, causal=False), lambda s: s * SCALAR * math.log(7), [SCALAR]),
    "softcap": (score.softcap(2.0), lambda s: 2 * torch.tanh(s / 2), []),
    "softcap learned": (
        score.softcap(POSITIVE),
        lambda s: POSITIVE[H] * torch.tanh(s / POSITIVE[H]),
        [POSITIVE],
    ),
    "head scale": (score.head_scale(SLOPES), lambda s: s * SLOPES[H], [SLOPES]),
    "head scale one": (score.head_scale(0.5), lambda s: s * 0.5, []),
    "query scale": (score.query_scale(PER_QUERY), lambda s: s * PER_QUERY[B, Q], [PER_QUERY]),
    "dense": (score.dense_bias(DENSE2), lambda s: s + DENSE2[Q, K], [DENSE2]),
    "dense heads": (score.dense_bias(DENSE3), lambda s: s + DENSE3[H, Q, K], [DENSE3]),
    "dense batch": (score.dense_bias(DENSE4), lambda s: s + DENSE4[B, H, Q, K], [DENSE4]),
    "dense broadcast": (score.dense_bias(DENSE1), lambda s: s + DENSE1[0, H, Q, K], [DENSE1]),
    "forgetting": (score.forgetting(GATES), lambda s: s + GATES[B, H, Q] - GATES[B, H, K], [GATES]),
    "graph spatial": (
        score.graphormer_spatial(SPATIAL, DISTANCES),
        lambda s: s + SPATIAL[H, DISTANCES[B, Q, K]],
        [SPATIAL],
    ),
    "graph edge": (score.graphormer_edge(EDGE, TYPES, PATH), lambda s: s + edge_bias(EDGE), [EDGE]),
    "chain": (
        score.alibi(SLOPES) >> score.softcap(3.0) >> score.dense_bias(DENSE2),
        lambda s: 3 * torch.tanh((s - SLOPES[H] * (PLACE - K).abs()) / 3) + DENSE2[Q, K],
        [SLOPES, DENSE2],
    ),
    "chain, one tensor twice": (
        score.head_scale(SLOPES) >> score.softcap(POSITIVE) >> score.head_scale(SLOPES),
        lambda s: POSITIVE[H] * torch.tanh(s * SLOPES[H] / POSITIVE[H]) * SLOPES[H],
        [SLOPES, POSITIVE],
    ),
    "identity": (score.identity(), lambda s: s, []),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name):
    mod, formula, leaves = CASES[name]
    values = INDICES | {"score": SCORES}

    def full(node):
        return evaluate(node, values).double().broadcast_to(SIZES)

    scores = SCORES.clone().requires_grad_()
    expected = formula(scores).broadcast_to(SIZES)
    weights = torch.randn(SIZES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((expected * weights).sum(), [scores, *leaves])
    derivative = mod.gradient()
    torch.testing.assert_close(full(mod.expr), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full(derivative.score) * weights, gradients[0], rtol=1e-5, atol=1e-5)
    sums = {id(t): torch.zeros(t.shape, dtype=torch.float64) for t in leaves}
    for capture, indices, node in derivative.captured:
        total, where = sums[id(capture.tensor)], tuple(evaluate(i, values) for i in indices)
        product = full(node) * weights
        if where:
            where = tuple(i.broadcast_to(SIZES) for i in where)
            total.index_put_(where, product, accumulate=True)
        else:
            total += product.sum()
    for leaf, gradient in zip(leaves, gradients[1:], strict=True):
        torch.testing.assert_close(sums[id(leaf)], gradient.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes_of_the_paper(heads, expected):
    assert score.alibi_slopes(heads).tolist() == expected


def test_t5_buckets_of_the_published_sizes():
    for bidirectional in (True, False):
        buckets = score.t5_buckets(32, bidirectional, 128)
        distances = range(-128, 129)
        for distance, bucket in zip(distances, buckets.tolist(), strict=True):
            assert bucket == t5_bucket_as_published(distance, bidirectional, 32, 128), distance


def test_order_of_a_chain_matters():
    cap, scale = score.softcap(5.0), score.head_scale(2.0)
    assert cap >> scale != scale >> cap
    assert [p.name for p in (cap >> scale >> cap).parts] == [cap.name, scale.name, cap.name]


SAME_KEY = {
    "alibi": score.alibi,
    "softcap": lambda n: score.softcap(float(n)),
    "head scale": lambda n: score.head_scale(n / 3),
    "dense": lambda n: score.dense_bias(torch.rand(n, n + 1)),
    "llama4": lambda n: score.llama4_temperature(float(n), n / 7),
    "ssmax": lambda n: score.ssmax(n / 5),
    "sandwich": lambda n: score.sandwich(n, n + 4, 2 * n),
}


@pytest.mark.parametrize("name", SAME_KEY)
def test_new_values_keep_the_key(name):
    first, second = SAME_KEY[name](2), SAME_KEY[name](3)
    assert first.key == second.key and first != second


def test_equality():
    assert score.softcap(3.0) == score.softcap(3.0) != score.softcap(4.0)
    assert hash(score.softcap(3.0)) == hash(score.softcap(3.0))
    assert score.head_scale(parameter(2.0)) == score.head_scale(2.0)


REFUSED = {
    "slopes int": (lambda: score.alibi(torch.arange(4)), "slopes is torch.int64"),
    "slopes rank": (lambda: score.alibi(torch.rand(1, 2, 3)), r"\(heads_q,\)"),
    "slopes list": (lambda: score.alibi([1.0, 2.0]), r"slopes is a list.*torch.tensor\(slopes\)"),
    "heads": (lambda: score.alibi(0), "heads=0"),
    "align": (lambda: score.alibi(4, align="x"), "bottom_right"),
    "cap zero": (lambda: score.softcap(0.0), "cap=0.0; a positive number"),
    "cap nan": (lambda: score.softcap(float("nan")), "positive number"),
    "cap int tensor": (lambda: score.softcap(torch.tensor(3)), "torch.int64"),
    "cap string": (lambda: score.softcap("30"), "cap='30'"),
    "even table": (lambda: score.relative_bias(torch.rand(4)), "4 entries a head"),
    "t5 few": (lambda: score.t5_bias(torch.rand(2, 4)), "at least 4 buckets"),
    "t5 rank": (lambda: score.t5_bias(torch.rand(32)), r"\(buckets, heads_q\)"),
    "bias bool": (lambda: score.dense_bias(torch.ones(2, 2).bool()), "torch.bool"),
    "bias rank": (lambda: score.dense_bias(torch.rand(3)), "seqlen_q, seqlen_k"),
    "floor": (lambda: score.llama4_temperature(-1.0), "floor=-1.0"),
    "gates": (lambda: score.forgetting(torch.rand(3)), r"\(batch, heads_q, seqlen\)"),
    "query scale": (lambda: score.query_scale(torch.rand(1, 2, 3, 4)), "seqlen_q"),
    "buckets": (
        lambda: score.graphormer_spatial(torch.rand(2, 2), integers(5, 4, 4) + 2),
        "the table has 0..1",
    ),
    "places": (
        lambda: score.graphormer_edge(torch.rand(2, 3, 4), TYPES, PATH),
        "2 places and table 3",
    ),
    "path ranks": (lambda: score.graphormer_edge(EDGE, TYPES, PATH[0]), "needs one more"),
    "chain": (lambda: score.alibi(2) >> (lambda s, b, h, q, k: s), "score.define"),
    "truth": (lambda: bool(score.alibi(2)), "no truth value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    build, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        build()
