"""Backward passes as autograd, `torch.compile` and checkpoints make them, run in the emulator."""

from __future__ import annotations

import pytest
import torch
from sampled import one_of
from torch.utils.checkpoint import checkpoint

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated_backward import TARGETS

from fa4core import Problem, Variant, attention, dispatch
from fa4core.emulator.session import emulator
from primitives import mask, score, sequence, sink

targets = pytest.mark.parametrize("target", TARGETS)
first = pytest.mark.parametrize("target", one_of(2, TARGETS))


def qkv(seqlen: int = 70, heads: int = 2, d: int = 16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = 1, seqlen, heads, d
    tensors = [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]
    return [t.requires_grad_() for t in tensors]


def variant() -> tuple[Variant, list[torch.Tensor]]:
    slopes, logits = torch.tensor([0.1, 0.3]), torch.tensor([0.5, -1.0])
    learned = [slopes.requires_grad_(), logits.requires_grad_()]
    return Variant(mask.causal(), score.alibi(slopes), sink=sink.learned(logits)), learned


def gradients(function, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of something that depends on the output and on the LSE."""
    out, lse = function()
    return list(torch.autograd.grad(out.float().sin().sum() + lse.sin().sum(), leaves))


@pytest.fixture
def prepared(monkeypatch) -> list[str]:
    """Grows whenever a backward pass is prepared."""
    made, prepare = [], dispatch.prepare_backward

    def counted(skeleton, *arguments):
        made.append(skeleton.function)
        return prepare(skeleton, *arguments)

    monkeypatch.setattr(dispatch, "prepare_backward", counted)
    return made


def expect(found: list[torch.Tensor], mod: Variant, leaves: list[torch.Tensor]) -> None:
    def reference():
        return attention(*leaves[:3], mod, return_lse=True, backend="reference")

    for one, other in zip(found, gradients(reference, leaves), strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.03, rtol=0.03)


@first
def test_gradients_are_those_of_the_reference(target: str, prepared) -> None:
    mod, learned = variant()
    leaves = qkv() + learned

    def attend():
        return attention(*leaves[:3], mod, return_lse=True, backend="emulator")

    with emulator(target, num_sms=2):
        expect(gradients(attend, leaves), mod, leaves)
    assert len(prepared) == 1 and target in prepared[0]


def test_a_checkpoint_computes_the_output_again(prepared) -> None:
    """And finds what was prepared, though it gives back other tensors than were saved."""
    mod, learned = variant()
    leaves = qkv() + learned

    def attend(q, k, v):
        return attention(q, k, v, mod, return_lse=True, backend="emulator")

    for _ in range(2):
        found = gradients(lambda: checkpoint(attend, *leaves[:3], use_reentrant=False), leaves)
        expect(found, mod, leaves)
    assert len(prepared) == 1


def test_a_compiled_graph_calls_the_kernels(prepared) -> None:
    """Both operators are in it. (torch.compile takes no function inside an emulator's block.)"""
    torch._dynamo.reset()
    mod, learned = variant()
    leaves = qkv() + learned
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, mod, return_lse=True, backend="emulator"),
        fullgraph=True,
        backend="aot_eager",
    )
    expect(gradients(lambda: compiled(*leaves[:3]), leaves), mod, leaves)
    assert prepared == ["fa4core.sm100.backward.kernel:backward"]


@first
def test_a_backward_pass_is_prepared_once(target: str, prepared) -> None:
    """Until something that its plan was made of changes; captured values are read in place."""
    mod, learned = variant()
    lengths = torch.tensor([0, 30, 70], dtype=torch.int32)
    layout = sequence.varlen(lengths)
    leaves = [t.detach()[0].requires_grad_() for t in qkv()] + learned

    def attend():
        return attention(*leaves[:3], mod, layout=layout, return_lse=True, backend="emulator")

    with emulator(target, num_sms=2):
        first = gradients(attend, leaves)
        again = gradients(attend, leaves)
        assert len(prepared) == 1
        with torch.no_grad():
            learned[0].mul_(10.0)
        steeper = gradients(attend, leaves)
        assert len(prepared) == 1
        lengths[1] = 40
        other = gradients(attend, leaves)
        assert len(prepared) == 2
    for one, same in zip(first, again, strict=True):
        torch.testing.assert_close(one, same)
    assert not torch.allclose(steeper[0], first[0], atol=1e-2)
    assert not torch.allclose(other[0], steeper[0], atol=1e-2)


def test_an_exported_variant_has_gradients_without_the_compiler(tmp_path, monkeypatch) -> None:
    from fa4core.compile import build, cache, disk, export, load

    mod, _ = variant()
    export(
        mod, Problem(1, 2, 2, 16, 16, (70,), (70,)), "sm100", tmp_path / "learns.fa4",
        emulated=True, gradients=True,
    )  # fmt: skip

    def refuse(kernel: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(build, "build", refuse)
    monkeypatch.setenv(disk.VARIABLE, disk.OFF)
    cache.clear()
    leaves = qkv()
    attend = load(tmp_path / "learns.fa4")
    for return_lse in (False, True):
        out = attend(*leaves, return_lse=return_lse)
        outputs = list(out) if return_lse else [out]
        found = torch.autograd.grad(sum(o.float().sum() for o in outputs), leaves)
        assert all(gradient.any() for gradient in found)


@targets
def test_without_heads_there_are_no_gradients_but_zeros(target: str) -> None:
    q, k, v = (torch.randn(1, 5, heads, 16).bfloat16().requires_grad_() for heads in (0, 2, 2))
    with emulator(target, num_sms=2):
        attention(q, k, v, backend="emulator").sum().backward()
    assert q.grad.shape == q.shape
    assert not k.grad.any()
    assert not v.grad.any()


@first
def test_a_sum_has_an_expanded_gradient(target: str) -> None:
    leaves = qkv()
    with emulator(target, num_sms=2):
        found = torch.autograd.grad(attention(*leaves, backend="emulator").sum(), leaves)
    expected = torch.autograd.grad(attention(*leaves, backend="reference").sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.03, rtol=0.03)


@targets
def test_what_has_no_backward_kernel_is_refused_with_the_reason(target: str) -> None:
    q, (k, v) = qkv()[0], (t.detach()[0].view(5, 14, 2, 16) for t in qkv()[1:])
    pages = sequence.paged(torch.tensor([[1, 0, 4, 3, 2]], dtype=torch.int32), torch.tensor([70]))
    out, lse = attention(q, k, v, layout=pages, backend="reference", return_lse=True)
    given = torch.ones_like(out), None, q, k, v, out, lse, []
    places = None, None, None, pages.seqused_k, pages.page_table, None, None
    with emulator(target), pytest.raises(NotImplementedError, match=r"paged|page"):
        torch.ops.fa4core.backward(*given, *places, Variant().spec, None, "emulator", False)
