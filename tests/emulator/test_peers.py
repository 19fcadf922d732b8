"""Other people's kernels, unmodified from their package: FlashAttention-4 against float64."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
if importlib.util.find_spec("flash_attn") is None:
    pytest.skip("flash-attn-4 is not installed", allow_module_level=True)

import attrs

from fa4core.emulator.host.facade import cuda_facade
from fa4core.emulator.session import emulator
from fa4core.report.peer import import_fa4


@pytest.fixture(scope="module")
def interface():
    try:
        return import_fa4()
    except ImportError as error:
        pytest.skip(f"flash_attn.cute cannot be imported: {error}")


@attrs.frozen
class Problem:
    """One attention problem; lengths makes it a packed batch (seqlen is then their sum)."""

    head_dim: int
    causal: bool = False
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 256
    seqlen_k: int = 256
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        packed = f" varlen {self.lengths}" if self.lengths else ""
        return f"d{self.head_dim} {kind} {self.heads}/{self.heads_kv} heads{packed}"

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q (1, seqlen_q, heads, d), k and v (1, seqlen_k, heads_kv, d), bf16."""
        torch.manual_seed(0)
        total = sum(self.lengths)
        shape_q = (1, total or self.seqlen_q, self.heads, self.head_dim)
        shape_k = (1, total or self.seqlen_k, self.heads_kv, self.head_dim)
        return tuple(torch.randn(shape).bfloat16() for shape in (shape_q, shape_k, shape_k))

    def spans(self) -> list[tuple[slice, slice]]:
        """(queries, keys) of each sequence."""
        if not self.lengths:
            return [(slice(0, self.seqlen_q), slice(0, self.seqlen_k))]
        ends = torch.tensor((0, *self.lengths)).cumsum(0).tolist()
        spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
        return [(span, span) for span in spans]


def oracle(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Output and LSE in float64; causal aligns bottom-right."""
    q, k, v = (x.double() for x in (q, k, v))
    repeat = problem.heads // problem.heads_kv
    outs, lses = [], []
    for queries, keys in problem.spans():
        qs = q[0, queries].transpose(0, 1)
        ks, vs = (x[0, keys].transpose(0, 1).repeat_interleave(repeat, 0) for x in (k, v))
        scores = qs @ ks.transpose(1, 2) / math.sqrt(problem.head_dim)
        if problem.causal:
            rows, columns = scores.shape[1:]
            hidden = torch.ones(rows, columns).triu(columns - rows + 1).bool()
            scores = scores.masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ vs).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs)[None], torch.cat(lses, -1)[None]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def run(interface, problem: Problem, seed: int, backward: bool, num_sms: int | None = None):
    """(out, lse, gradients) from FA4 in the emulator."""
    q, k, v = problem.tensors()
    gradient = torch.randn_like(q)
    with (
        emulator("sm100", seed=seed, num_sms=num_sms, record=False) as session,
        cuda_facade(session.target, session.num_sms),
    ):
        q, k, v = (x.requires_grad_(backward) for x in (q, k, v))
        if problem.lengths:
            ends = torch.tensor((0, *problem.lengths), dtype=torch.int32).cumsum(0).int()
            out, lse = interface.flash_attn_varlen_func(
                q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends,
                max_seqlen_q=max(problem.lengths), max_seqlen_k=max(problem.lengths),
                causal=problem.causal, return_lse=True,
            )  # fmt: skip
            out, lse = out[None], lse[None]
        else:
            out, lse = interface.flash_attn_func(q, k, v, causal=problem.causal, return_lse=True)
        grads = torch.autograd.grad(out, (q, k, v), gradient) if backward else ()
    return (q, k, v, gradient), (out.detach(), lse.detach(), *grads)


def check(interface, problem: Problem, seed: int, backward: bool, num_sms: int | None = None):
    inputs, (out, lse, *grads) = run(interface, problem, seed, backward, num_sms)
    q, k, v = (x.detach().double().requires_grad_(backward) for x in inputs[:3])
    want_out, want_lse = oracle(problem, q, k, v)
    assert relative(out, want_out.detach()) < 4e-3
    assert relative(lse, want_lse.detach()) < 1e-5
    if backward:
        wanted = torch.autograd.grad(want_out, (q, k, v), inputs[3].double())
        for name, got, want in zip("qkv", grads, wanted, strict=True):
            assert relative(got, want) < 6e-3, f"d{name}"


FORWARD = [
    Problem(128, causal=True),
    Problem(64),
    Problem(128, heads=4, heads_kv=1),
    Problem(64, causal=True, lengths=(100, 33, 190)),
]
MORE_FORWARD = [
    Problem(128),
    Problem(64, causal=True),
    Problem(128, causal=True, seqlen_q=130, seqlen_k=300),
    Problem(128, causal=True, lengths=(128, 1, 77)),
    Problem(64, causal=True, heads=4, heads_kv=2),
]


@pytest.mark.parametrize("problem", FORWARD, ids=str)
def test_forward(interface, problem: Problem):
    check(interface, problem, seed=1, backward=False)


def test_backward(interface):
    check(interface, Problem(128), seed=2, backward=True)


@pytest.mark.sweep
@pytest.mark.parametrize("problem", FORWARD + MORE_FORWARD, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_forward_sweep(interface, problem: Problem, seed: int):
    check(interface, problem, seed, backward=False, num_sms=2)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "problem", [Problem(64), Problem(128, causal=True), Problem(128, heads=4, heads_kv=2)], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_backward_sweep(interface, problem: Problem, seed: int):
    check(interface, problem, seed, backward=True)
