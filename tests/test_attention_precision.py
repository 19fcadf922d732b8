"""Errors against float64 are at most twice those of plain torch at the same precision.

The causal + ALiBi + softcap + sliding-window variant, over head dims, lengths, GQA and dtypes:
every value of each, not every combination. `python benchmarks/reference.py errors` measures all.
"""

import pytest
import torch

from fa4core import Variant, attention
from fa4core.reference.oracle import oracle
from primitives import mask, score

WINDOW, CAP = 700, 30.0


def plain(q, k, v, slopes):
    """The variant as one writes it in torch, everything in the inputs' dtype."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    bias = (slopes[:, None, None] * (j - i)).to(q.dtype)
    s = CAP * torch.tanh((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias) / CAP)
    distance = i + k.shape[2] - q.shape[2] - j
    allowed = (distance >= 0) & (distance <= WINDOW)
    empty = ~allowed.any(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(~(allowed | empty), -torch.inf), -1)
    return (p.masked_fill(empty, 0.0) @ v).transpose(1, 2)


def allowance(exact, inputs, weight):
    """What is free where plain torch is exact by luck: with one key P is 1 and dS is 0.

    Half a unit in the last place of the result; and one of float32 in what dS is the difference
    of, dO . V and rowsum(dO * O), carried through the product with K or Q.
    """
    if not weight.numel() or not inputs[1].numel():
        return 0.0
    q, k, v = (t.double().abs() for t in inputs)
    group = q.shape[2] // k.shape[2]
    terms = weight.double().abs().sum(-1).max() * v.max() * torch.maximum(q.max(), k.max())
    terms *= group * q.shape[-1] ** -0.5
    own = torch.finfo(weight.dtype).eps / 2 * exact.abs().max().item()
    return own + torch.finfo(torch.float32).eps * terms.item()


CASES = [
    *((d, 129, 129, 1) for d in (8, 16, 40, 72, 128, 192, 256)),
    *((64, n, n, 1) for n in (1, 7, 63, 64, 65, 127, 128, 129, 1000)),
    *((40, m, n, group) for m, n, group in ((100, 333, 3), (333, 100, 8), (128, 65, 3))),
    *((16, m, n, 1) for m, n in ((0, 7), (7, 0), (1, 1000))),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d, m, n, group", CASES)
def test_error(d, m, n, group, dtype):
    generator = torch.Generator().manual_seed(d + m + n)
    heads_kv = 2 if group < 8 else 1
    heads = heads_kv * group
    shapes = [(1, m, heads, d), (1, n, heads_kv, d), (1, n, heads_kv, d), (1, m, heads, d)]
    *inputs, weight = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    slopes = 2.0 ** -(1 + torch.arange(heads) / 2)
    variant = Variant(
        mask=mask.causal() & mask.sliding_window(WINDOW),
        score=score.alibi(slopes) >> score.softcap(CAP),
    )
    results = []
    for function in (
        lambda *t: attention(*t, variant),
        lambda *t: oracle(*t, variant)[0],
        lambda *t: plain(*t, slopes),
    ):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, weight.to(out.dtype))])
    for name, ours, exact, theirs in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        if exact.numel() == 0:
            continue
        error, yardstick = ((t.double() - exact).abs().max().item() for t in (ours, theirs))
        free = allowance(exact, inputs, weight)
        assert error <= 2 * yardstick + free, f"{name}: {error:.2e}, plain torch {yardstick:.2e}"
