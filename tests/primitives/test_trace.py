"""Functions as users write them, against torch itself evaluated element by element."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from evaluation import evaluate, grid
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from primitives import mask, score, sink
from primitives.expr import captures

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 2, 5, 6
SIZES = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)


def elements():
    for index in itertools.product(*map(range, SIZES)):
        yield index, [torch.tensor(i) for i in index]


def assert_mask_as_torch(function) -> None:
    given = evaluate(mask.define(function).expr, grid(SEQLEN_Q, SEQLEN_K, BATCH, HEADS))
    given = given.broadcast_to(SIZES)
    for index, scalars in elements():
        assert bool(given[index]) == bool(function(*scalars)), index


def assert_score_as_torch(function, *leaves: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Value, derivative by the score, and gradients of the leaves."""
    mod = score.define(function)
    values = grid(SEQLEN_Q, SEQLEN_K, BATCH, HEADS)
    generator = torch.Generator().manual_seed(0)
    values["score"] = torch.randn(SIZES, generator=generator, dtype=torch.float64)

    def full(node):
        return evaluate(node, values).broadcast_to(SIZES)

    derivative = mod.gradient()
    sums = {id(t): torch.zeros(t.shape, dtype=torch.float64) for t in leaves}
    for capture, indices, node in derivative.captured:
        total, where = sums[id(capture.tensor)], tuple(full(i) for i in indices)
        if where:
            total.index_put_(where, full(node).double(), accumulate=True)
        else:
            total += full(node).double().sum()
    scores = values["score"].clone().requires_grad_()
    expected = torch.stack([function(scores[i], *s).double() for i, s in elements()]).view(SIZES)
    gradients = torch.autograd.grad(expected.sum(), [scores, *leaves], allow_unused=True)
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(full(mod.expr).double(), expected.detach())
    by_score = torch.zeros_like(scores) if gradients[0] is None else gradients[0]
    close(full(derivative.score).double(), by_score)
    for leaf, gradient in zip(leaves, gradients[1:], strict=True):
        close(sums[id(leaf)], gradient.double())


def learned(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


IDS = torch.tensor([0, 0, 1, 1, 2, 2])
TABLE = torch.randint(0, 2, (2, 2, 6, 6), generator=torch.Generator().manual_seed(2)).bool()
OFFSETS = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
INTERVALS = torch.tensor([[0, 3], [1, 4], [2, 5]])
COUNT = torch.tensor(3)
WINDOWS = torch.tensor([1, 3], dtype=torch.uint8)
PERMUTED = torch.arange(24).view(2, 3, 4).permute(2, 0, 1)


def document_causal(b, h, q_idx, kv_idx):
    start = OFFSETS[IDS[q_idx]]
    return (kv_idx >= start) & (q_idx >= kv_idx)


def with_default(b, h, q_idx, kv_idx, window=2):
    return (q_idx - kv_idx).abs() <= window


def nested(inner, size):
    def outer(b, h, q_idx, kv_idx):
        return (q_idx // size == kv_idx // size) & inner(b, h, q_idx % size, kv_idx % size)

    return outer


def morton(code):
    code = code & 0x55555555
    return (code | (code >> 1)) & 0x33333333


def morton_distance(b, h, q_idx, kv_idx):
    return (morton(q_idx) - morton(kv_idx >> 1)).abs() <= 1


def unpacked(b, h, q_idx, kv_idx):
    first, last = INTERVALS[IDS[kv_idx]]
    return (q_idx >= first) & (q_idx < last)


def reassigned(b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    distance += 1
    allowed = distance > 0
    allowed |= kv_idx == 0
    return allowed


class Rule:
    def __init__(self, width):
        self.width = width

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.width


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ids", IDS)
        self.bias = torch.nn.Parameter(torch.randn(2))

    def mask(self, b, h, q_idx, kv_idx):
        return self.ids[q_idx] == self.ids[kv_idx]

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h] * (q_idx - kv_idx)


MODULE = Module()
MASKS = {
    "document_causal": document_causal,
    "default": with_default,
    "partial": functools.partial(with_default, window=1),
    "nested": nested(nested(with_default, 3), 4),
    "object": Rule(2),
    "method": MODULE.mask,
    "morton": morton_distance,
    "unpacked": unpacked,
    "reassigned": reassigned,
    "lambda": lambda *args: args[2] >= args[3],
    "logical": lambda b, h, q, k: torch.logical_or(torch.logical_not(q > k), torch.eq(k, 0)),
    "xor": lambda b, h, q, k: (q > k) ^ (k > 2) ^ torch.logical_xor(h == 0, q == 1),
    "where": lambda b, h, q, k: torch.where(h == 0, q >= k, q <= k),
    "where_numbers": lambda b, h, q, k: torch.where(q > k, q, -k) > 2,
    "per_head": lambda b, h, q, k: q - k <= WINDOWS[h],
    "clamp": lambda b, h, q, k: (q.clamp(1, 3) - k).abs() <= torch.clamp(k, max=2),
    "min_max": lambda b, h, q, k: torch.minimum(q, k) + torch.maximum(q, COUNT) > torch.max(q, k),
    "bits": lambda b, h, q, k: ((q & 3) | (k << 1)) != (q ^ k),
    "shift": lambda b, h, q, k: (q << 2 >> 1) >= torch.bitwise_right_shift(k * 4, 1),
    "bit_not": lambda b, h, q, k: ~q < -k,
    "modulo": lambda b, h, q, k: (q - k) % 3 == 0,
    "remainders": lambda b, h, q, k: torch.fmod(q - k, 3) >= torch.remainder(k - q, 3) - 2,
    "floor": lambda b, h, q, k: torch.div(q - k, 2, rounding_mode="trunc") < (q - k) // 2 + 1,
    "pow": lambda b, h, q, k: q**2 + k.pow(2) < 20,
    "negative": lambda b, h, q, k: -q + 3 > k.neg() * 2,
    "floats": lambda b, h, q, k: (q.float() * 0.3).sin() > (k / 7).cos() - 0.5,
    "cast": lambda b, h, q, k: (q * 0.7).long() >= k.to(torch.float32).int(),
    "truth": lambda b, h, q, k: (q - k).bool(),
    "sum_of_bools": lambda b, h, q, k: (q > k) + (k > 2),
    "product": lambda b, h, q, k: ((q > k) * q).bool(),
    "dense": lambda b, h, q, k: TABLE[b, h, q, k],
    "two_steps": lambda b, h, q, k: TABLE[b, h][q][k],
    "ellipsis": lambda b, h, q, k: TABLE[0, ..., k][h][q],
    "negative_constant": lambda b, h, q, k: TABLE[-1, -2, q, k],
    "slices": lambda b, h, q, k: TABLE[:, 1:, 0:6, ::1][b, 0, q, k],
    "step": lambda b, h, q, k: IDS[1::2][q // 2] > k,
    "none": lambda b, h, q, k: IDS[None, :][0, q] == IDS[:, None][k, 0],
    "computed_index": lambda b, h, q, k: IDS[(q + k) // 2] > IDS[torch.minimum(q, k)],
    "negative_index": lambda b, h, q, k: IDS[q - k] > 0,
    "index_select": lambda b, h, q, k: IDS.index_select(0, q.view(1))[0] > k,
    "take": lambda b, h, q, k: torch.take(IDS, q) > k,
    "gather": lambda b, h, q, k: torch.gather(IDS, 0, q[None])[0] > k,
    "permuted": lambda b, h, q, k: PERMUTED[q % 4, h, k % 3] > 9,
    "transposed_inside": lambda b, h, q, k: TABLE.transpose(0, 1)[h, b].T[k, q],
    "reshaped_inside": lambda b, h, q, k: TABLE.flatten()[((b * 2 + h) * 6 + q) * 6 + k],
    "expanded": lambda b, h, q, k: IDS.expand(3, 6)[h, q] == IDS.view(2, 3)[k // 3, k % 3],
    "unsqueezed": lambda b, h, q, k: IDS.unsqueeze(1).squeeze(1)[q] > k,
    "table_arithmetic": lambda b, h, q, k: (IDS * 2 - 1)[q] > (IDS > 1)[k],
    "scalar_table": lambda b, h, q, k: q - k < COUNT,
    "made_inside": lambda b, h, q, k: q < torch.tensor(3) + torch.full((), 1) - torch.arange(4)[2],
    "list_inside": lambda b, h, q, k: torch.tensor([3, 1, 2, 5, 0])[q] > k,
    "cat": lambda b, h, q, k: torch.cat([IDS[:2] + 7, IDS[2:]])[q] > k,
    "stack": lambda b, h, q, k: torch.stack([q, k, h]).amax() > 3,
    "reductions": lambda b, h, q, k: INTERVALS[IDS[k]].sum() > INTERVALS.amin(0)[1] + q,
    "any": lambda b, h, q, k: (INTERVALS[:, 0] == q).any() | (k == INTERVALS).all(),
    "any_table": lambda b, h, q, k: TABLE[b, h, q].any() & ~TABLE[b, h].all(-1)[k],
    "max_min": lambda b, h, q, k: INTERVALS.max() - INTERVALS.min() > q,
    "device_and_size": lambda b, h, q, k: q < torch.ones(IDS.shape[0], device=q.device).sum(),
    "no_grad": torch.no_grad()(lambda b, h, q, k: q >= k),
    "constant": lambda b, h, q, k: torch.ones((), dtype=torch.bool),
    "sign": lambda b, h, q, k: torch.sign(q - k) * 2 >= 0,
    "isin": lambda b, h, q, k: ((q == 1) | (q == 3)) & torch.isfinite(k / 2),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_function(name):
    assert_mask_as_torch(MASKS[name])


def test_python_truth_values_are_constants():
    assert mask.define(lambda b, h, q, k: True) == mask.full()
    assert mask.define(lambda b, h, q, k: False) == ~mask.full()


def test_lengths_are_keyword_only_arguments():
    @mask.define
    def aligned(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        return kv_idx <= q_idx + seqlen_k - seqlen_q

    assert aligned == mask.causal()


class _Clipped(torch.autograd.Function):
    """A custom function whose derivative is its own choice, as straight-through estimators are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


class _Product(torch.autograd.Function):
    """Is given a captured tensor itself."""

    @staticmethod
    def forward(x, table, h):
        return x * table[h]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, table, h = ctx.saved_tensors
        by_table = torch.zeros_like(table).index_put((h,), (grad * x).to(table.dtype))
        return grad * table[h], by_table, None


POINTWISE = {
    "tanh": lambda x: 2 * torch.tanh(x / 2),
    "custom": _Clipped.apply,
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 1),
    "sigmoid": torch.sigmoid,
    "sin": lambda x: x.sin() * x.cos(),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "rsqrt": lambda x: torch.rsqrt(x * x + 1),
    "square": torch.square,
    "power": lambda x: x**3 + x.abs() ** 1.5,
    "base": lambda x: 2**x,
    "reciprocal": lambda x: 1 / (x + 10),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "maximum": lambda x: torch.maximum(x, -0.5 * x),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1.0),
    "floor": lambda x: x.floor() + x.frac() * 2,
    "erf": torch.erf,
    "atan2": lambda x: torch.atan2(x, x + 3),
    "log1p": lambda x: x.exp().log1p(),
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "stack": lambda x: torch.stack([x, 2 * x, 1 - x]).sum(),
    "mean": lambda x: torch.stack([x, x * x]).mean(),
    "amax": lambda x: torch.stack([x, 0.3 * x]).amax(),
    "softmax": lambda x: torch.softmax(torch.stack([x, 2 * x]), 0)[1],
    "logsumexp": lambda x: torch.logsumexp(torch.stack([x, 2 * x]), 0),
    "in_place": lambda x: (x * 1).add_(2).mul_(3),
    "cast": lambda x: x.double().float().to(torch.float64) * 2,
    "detach": lambda x: x * x.detach(),
} | {
    name: getattr(F, name)
    for name in (
        *("gelu", "relu", "silu", "softplus", "elu", "leaky_relu", "hardtanh", "selu", "mish"),
        *("logsigmoid", "hardswish", "softsign", "celu", "relu6"),
    )
}


@pytest.mark.parametrize("name", POINTWISE)
def test_score_function_of_the_score(name):
    function = POINTWISE[name]
    assert_score_as_torch(lambda s, b, h, q, k: function(s))


HEAD, HEAD2 = learned(2), learned(2, 6, seed=3)
DENSE = learned(2, 2, 5, 6, seed=4)
QUERY_ROPE, KEY_ROPE = learned(2, 2, 5, 4, seed=5), learned(2, 1, 6, 4, seed=6)
SCALE = learned(seed=7)
SLICED = learned(2, 3, 4, seed=8)
WITH_LEAVES = {
    "slope": (lambda s, b, h, q, k: s + HEAD[h] * (k - q), [HEAD]),
    "activated_table": (lambda s, b, h, q, k: s * HEAD.sigmoid()[h], [HEAD]),
    "two_indexings": (lambda s, b, h, q, k: s + HEAD2[h, q] - HEAD2[h, k], [HEAD2]),
    "nonlinear": (
        lambda s, b, h, q, k: torch.tanh(s * HEAD[h]) * torch.exp(HEAD2[h, k]),
        [HEAD, HEAD2],
    ),
    "dense": (lambda s, b, h, q, k: s + DENSE[b, h, q, k], [DENSE]),
    "two_steps": (lambda s, b, h, q, k: s + DENSE[b][h, q][k], [DENSE]),
    "transposed": (lambda s, b, h, q, k: s * DENSE.transpose(2, 3)[b, h, k, q], [DENSE]),
    "first_head": (lambda s, b, h, q, k: s + DENSE[b, 0, q, k] + DENSE[0, -1, q, k], [DENSE]),
    "sliced": (lambda s, b, h, q, k: s + SLICED[:, 1:, ::2][h, q % 2, k % 2], [SLICED]),
    "ellipsis": (lambda s, b, h, q, k: s + SLICED[h, ..., 1][q % 3], [SLICED]),
    "dot": (
        lambda s, b, h, q, k: s + torch.dot(QUERY_ROPE[b, h, q], KEY_ROPE[b, h // 2, k]),
        [QUERY_ROPE, KEY_ROPE],
    ),
    "row_sum": (lambda s, b, h, q, k: s + (QUERY_ROPE[b, h, q] ** 2).sum(), [QUERY_ROPE]),
    "scalar": (lambda s, b, h, q, k: s * SCALE + SCALE, [SCALE]),
    "module": (MODULE.score, [MODULE.bias]),
    "custom_function": (lambda s, b, h, q, k: _Product.apply(s, HEAD, h), [HEAD]),
    "custom_sum": (lambda s, b, h, q, k: _Product.apply(s, HEAD, h) + HEAD[h] * s, [HEAD]),
    "conditional": (
        lambda s, b, h, q, k: torch.where(q > k, s + HEAD[h], s * HEAD2[h, k]),
        [HEAD, HEAD2],
    ),
    "unused_score": (lambda s, b, h, q, k: HEAD[h] * (q - k), [HEAD]),
    "detached": (lambda s, b, h, q, k: s + HEAD.detach()[h] * HEAD2[h, q], [HEAD2]),
    "embedding": (lambda s, b, h, q, k: s + F.embedding(k % 4, SLICED[0].T)[h], [SLICED]),
    "unrolled": (
        lambda s, b, h, q, k: s + sum(torch.where(q > n, HEAD2[h, n], 0.0) for n in range(3)),
        [HEAD2],
    ),
}


@pytest.mark.parametrize("name", WITH_LEAVES)
def test_score_function_with_learned_tensors(name):
    function, leaves = WITH_LEAVES[name]
    assert_score_as_torch(function, *leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_captured_dtypes(dtype):
    table = torch.tensor([1.5, 2.0]).to(dtype)
    mod = score.define(lambda s, b, h, q, k: s * table.float()[h] + table[h].to(torch.float32))
    values = grid(2, 2, 1, 2) | {"score": torch.tensor(3.0, dtype=torch.float64)}
    assert evaluate(mod.expr, values).flatten().tolist() == [6.0, 8.0]
    (capture,) = captures(mod.expr)
    assert capture.tensor is table


def test_views_of_captured_tensors_keep_the_tensor():
    base = torch.randn(4, 6)
    view = base.t()
    mod = score.define(lambda s, b, h, q, k: s + view[q, k])
    assert mod.tensors == (view,)


def test_captured_tensor_of_another_device():
    table = torch.empty(4, device="meta", requires_grad=True)
    mod = score.define(lambda s, b, h, q, k: s + table[q] * torch.arange(4, device=table.device)[k])
    assert mod.tensors[0] is table
    assert [row[0].tensor for row in mod.gradient().captured] == [table]


def _forbidden(tensor):
    raise AssertionError("hooks around a definition are not for its trace")


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu"),
        lambda: saved_tensors_hooks(_forbidden, _forbidden),
        lambda: disable_saved_tensors_hooks("not here"),
    ],
    ids=["no_grad", "inference", "enable_grad", "default device", "autocast", "hooks", "no hooks"],
)
def test_context_of_the_definition_does_not_matter(context):
    def function(s, b, h, q, k):
        return (s * s).tanh() + HEAD[h] * torch.tensor(2)

    outside = score.define(function)
    with context():
        inside = score.define(function)
        assert torch.tensor(0).device.type in ("cpu", "meta")
    assert inside == outside
    assert inside.gradient() == outside.gradient() or (
        inside.gradient().captured == outside.gradient().captured
    )


def test_fake_tensor_mode_around_the_definition():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert mask.define(lambda b, h, q, k: (q >= k) & (k < 5)).key == (
            mask.define(lambda b, h, q, k: (k <= q) & (k < 5)).key
        )


def test_frozen_tables_have_no_gradient():
    mod = score.define(lambda s, b, h, q, k: s + HEAD.detach()[h])
    assert mod.gradient().captured == ()


def test_a_function_without_derivative_still_runs_forward():
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("no derivative here")

    mod = score.define(lambda s, b, h, q, k: Forward.apply(s))
    assert mod.expr is score.define(lambda s, b, h, q, k: s * 2).expr
    with pytest.raises(TypeError, match="cannot differentiate"):
        mod.gradient()


def test_sink_function_and_gradient():
    logits = learned(2, seed=9)
    learned_sink = sink.define(lambda b, h, q_idx: logits[h] * 2)
    (row,) = learned_sink.gradient().captured
    assert row[0].tensor is logits and row[2].attr == 2.0


def test_infinite_scores():
    assert_score_as_torch(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf))
