"""The kernels before and after the main backward kernel, in the emulator."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.backward.rows import Rows
from fa4core.compile import import_dsl
from fa4core.compile.cache import obtain
from fa4core.compile.kernel import Kernel, type_of
from fa4core.emulator.session import emulator
from fa4core.places import in_emulator
from fa4core.plan.problem import Problem

import_dsl()

from fa4core.backward.spec import RowSpec  # noqa: E402

LENGTHS = (70, 0, 100)
TARGETS = ("sm90", "sm100")


def launch(target: str, function: str, spec: RowSpec, *arguments) -> None:
    place = in_emulator(target)
    types = tuple(map(type_of, arguments))
    kernel = Kernel(f"fa4core.backward.{function}", types, spec, target, emulated=True)
    place.launcher(obtain(kernel).function)(*arguments)


def problem(d: int, packed: bool) -> tuple[Problem, tuple[int, ...]]:
    """Sizes, and the shape of the batch and row dimensions of queries."""
    if packed:
        return Problem(3, 2, 1, d, d, LENGTHS, LENGTHS, (0, 80, 80), (0, 70, 70)), (200,)
    return Problem(3, 2, 1, d, d, LENGTHS, LENGTHS), (3, 100)


def place(sizes: Problem, packed: bool, i: int) -> tuple:
    """Rows of sequence `i` in a tensor of queries."""
    if packed:
        return (slice(sizes.starts_q[i], sizes.starts_q[i] + LENGTHS[i]),)
    return i, slice(LENGTHS[i])


@pytest.mark.parametrize("grad_lse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("target", "d", "queries"), [("sm90", 8, 80), ("sm100", 80, 64), ("sm90", 256, 64)]
)
def test_before(target: str, d: int, queries: int, packed: bool, grad_lse: bool) -> None:
    """LSE in the log2 domain and delta, padded; a row without weights has +inf and 0, whatever its
    gradients are; dQ and turns are zero."""
    torch.manual_seed(0)
    sizes, outer = problem(d, packed)
    out = torch.randn(*outer, 2, d).bfloat16()
    grad_out = torch.randn(*outer, 2, d + 8).bfloat16()[..., :d]  # strides of its own
    by_head = (*outer[:-1], 2, outer[-1])
    lse, of_lse = torch.randn(by_head), torch.randn(by_head)
    lse[..., 3], of_lse[..., 3], out[..., 3, :, :] = -math.inf, math.nan, 0.0
    padded = Rows(sizes, queries)
    to_lse, delta = (torch.full((2, padded.count), math.nan) for _ in range(2))
    grad_q = torch.full((2, padded.count, -(-d // 16) * 16), math.nan)
    turns = torch.ones(2, padded.count // queries, dtype=torch.int32)
    spec = RowSpec(queries, d, grad_q.shape[-1], grad_lse)
    with emulator(target, num_sms=2):
        launch(
            target, "pre:prepare_rows", spec, out, grad_out, lse, of_lse, padded.table(), to_lse,
            delta, grad_q, turns,
        )  # fmt: skip
    assert not grad_q.any()
    assert not turns.any()
    expected = torch.full_like(to_lse, math.inf), torch.zeros_like(delta)
    products = (out.float() * grad_out.float()).sum(-1)
    for i, start in enumerate(padded.starts.tolist()):
        here = place(sizes, packed, i)
        heads_last = (t.transpose(-1, -2)[here].T for t in (lse, of_lse))
        base, shift = heads_last
        sums = products[here].T - (shift if grad_lse else 0.0)
        rows = slice(start, start + LENGTHS[i])
        nothing = base == -math.inf
        expected[0][:, rows] = torch.where(nothing, math.inf, base / math.log(2))
        expected[1][:, rows] = torch.where(nothing, 0.0, sums)
    torch.testing.assert_close(to_lse, expected[0])
    torch.testing.assert_close(delta, expected[1], atol=1e-4, rtol=1e-5)


def in_parts(sums: torch.Tensor, queries: int, part: int) -> torch.Tensor:
    """(heads, rows, d) as accumulators of 64 rows and `part` columns hold a tile: thread 4 i + j of
    a warp has rows i and i + 8 and of each 8 columns 2 j and 2 j + 1."""
    heads, rows, d = sums.shape
    tiles = sums.view(heads, rows // queries, queries // 64, 4, 2, 8, d // part, part // 8, 4, 2)
    #                                         R, warp, half, i, part, step, j, column
    held = tiles.permute(0, 1, 2, 6, 7, 3, 5, 8, 4, 9)
    return held.reshape(sums.shape).contiguous()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("target", "d", "queries", "part"),
    [("sm90", 8, 64, 0), ("sm90", 24, 64, 16), ("sm90", 72, 128, 80), ("sm100", 72, 64, 0)],
)
def test_after(target: str, d: int, queries: int, part: int, packed: bool) -> None:
    """Rows behind a sequence are left alone, whether sums are row-major or in parts."""
    torch.manual_seed(0)
    sizes, outer = problem(d, packed)
    padded = Rows(sizes, queries)
    sums = torch.randn(2, padded.count, -(-d // 16) * 16)
    grad_q = torch.full((*outer, 2, d), 7.0).bfloat16()
    expected = grad_q.clone()
    spec = RowSpec(queries, d, sums.shape[-1], part=part)
    given = in_parts(sums, queries, part) if part else sums
    with emulator(target, num_sms=2):
        launch(target, "post:finish_rows", spec, given, padded.table(), grad_q, 0.3)
    for i, start in enumerate(padded.starts.tolist()):
        rows = sums[:, start : start + LENGTHS[i], :d].transpose(0, 1)
        expected[place(sizes, packed, i)] = (rows * 0.3).bfloat16()
    assert torch.equal(grad_q, expected)
