"""A prepared call runs again without being planned, and only where nothing it depends on changed.

Executed by the emulator; each result is compared with what the long way gives.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant, attention, dispatch, kept
from fa4core.emulator.session import emulator
from fa4core.recorded import Recorded
from primitives import mask, parameter, score, sequence


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def qkv(rows: int = 40, heads: int = 2) -> list[torch.Tensor]:
    return [drawn(1, rows, heads, 64, seed=i) for i in range(3)]


@pytest.fixture
def planned(monkeypatch) -> list[str]:
    """One entry for each call that was planned; none are known from before."""
    for known in list(kept._known.values()):
        known.clear()
    seen: list[str] = []
    original = dispatch.plan_call

    def count(*args):
        seen.append(args[-1])
        return original(*args)

    monkeypatch.setattr(dispatch, "plan_call", count)
    return seen


def check(variant: Variant, tensors: list[torch.Tensor], layout=None, **options) -> torch.Tensor:
    out = attention(*tensors, variant, layout=layout, backend="emulator", **options)
    wanted = attention(*tensors, variant, layout=layout, backend="reference", **options)
    torch.testing.assert_close(out.float(), wanted.float(), atol=0.02, rtol=0.02)
    return out


def calls(planned: list[str]) -> int:
    return planned.count("emulator")


def test_the_second_call_plans_nothing(planned):
    variant = Variant(mask=mask.causal())
    for seed in range(3):
        check(variant, [t + seed for t in qkv()])
    assert calls(planned) == 1


def test_other_shapes_strides_and_scales_are_other_calls(planned):
    variant, tensors = Variant(mask=mask.causal()), qkv()
    check(variant, tensors)
    check(variant, tensors, scale=0.5)
    check(variant, qkv(41))
    strided = [torch.empty(1, 2, 40, 64).bfloat16().transpose(1, 2).copy_(t) for t in tensors]
    check(variant, strided)
    check(variant, [t.half() for t in tensors])
    assert calls(planned) == 5
    check(variant, [t.clone() for t in tensors], scale=0.5)
    assert calls(planned) == 5


def test_misaligned_tensors_are_copied_even_after_aligned_ones(planned):
    variant, tensors = Variant(), qkv()
    check(variant, tensors)
    room = torch.zeros(tensors[0].numel() + 8, dtype=torch.bfloat16)
    misaligned = room[1 : tensors[0].numel() + 1].view(tensors[0].shape)
    for seed in range(2):
        check(variant, [misaligned.copy_(tensors[0] + seed), *tensors[1:]])
    assert calls(planned) == 2


def test_a_captured_window_that_changes_in_place_is_seen(planned):
    window = parameter(5)
    variant = Variant(mask=mask.define(lambda b, h, q, k: (q - k < window) & (k <= q)))
    first = check(variant, qkv())
    window.fill_(20)
    assert not torch.equal(check(variant, qkv()), first)
    window.fill_(5)
    assert torch.equal(check(variant, qkv()), first)
    assert calls(planned) == 3


def test_document_ids_that_change_in_place_are_seen(planned):
    ids = torch.zeros(40, dtype=torch.int32)
    variant = Variant(mask=mask.define(lambda b, h, q, k: ids[q] == ids[k]))
    first = check(variant, qkv())
    ids[20:] = 1
    assert not torch.equal(check(variant, qkv()), first)
    assert calls(planned) == 2


def test_values_that_only_the_kernel_reads_may_change_without_planning(planned):
    slopes = torch.tensor([0.1, 0.2])
    variant = Variant(score=score.alibi(slopes))
    first = check(variant, qkv())
    slopes.mul_(4)
    assert not torch.equal(check(variant, qkv()), first)
    assert calls(planned) == 1


def test_a_table_that_had_to_be_copied_is_copied_again(planned):
    table = drawn(40, 80, seed=5).float()[:, ::2]
    variant = Variant(score=score.dense_bias(table))
    first = check(variant, qkv())
    table.mul_(-1)
    assert not torch.equal(check(variant, qkv()), first)
    assert calls(planned) == 2


def test_a_captured_tensor_with_new_storage_is_seen():
    slopes = torch.tensor([0.1, 0.2])
    variant = Variant(score=score.alibi(slopes))
    first = check(variant, qkv())
    slopes.data = torch.tensor([0.8, 0.4])
    assert not torch.equal(check(variant, qkv()), first)


def test_cumulative_lengths_that_change_in_place_are_seen(planned):
    variant, tensors = Variant(), [t[0] for t in qkv()]
    cu = torch.tensor([0, 10, 40], dtype=torch.int32)
    first = check(variant, tensors, sequence.varlen(cu))
    check(variant, tensors, sequence.varlen(cu))  # another layout of the same tensors
    assert calls(planned) == 1
    cu[1] = 30
    assert not torch.equal(check(variant, tensors, sequence.varlen(cu)), first)
    check(variant, tensors, sequence.varlen(cu.clone()))
    assert calls(planned) == 3


def test_rows_behind_seqused_are_zero_again_each_time():
    used = torch.tensor([25], dtype=torch.int32)
    for _ in range(2):
        out = check(Variant(), qkv(), sequence.fixed(seqused_q=used))
        assert not out[:, 25:].any()


def test_calls_without_work_give_zeros_each_time(planned):
    for _ in range(2):
        q, k, v = drawn(1, 0, 2, 64), drawn(1, 5, 2, 64), drawn(1, 5, 2, 64)
        assert attention(q, k, v, Variant(), backend="emulator").shape == (1, 0, 2, 64)
        empty = attention(k, q, q, backend="emulator", return_lse=True)
        assert not empty[0].any() and (empty[1] == -torch.inf).all()


def test_prepared_calls_die_with_their_variant():
    slopes = torch.tensor([0.1, 0.2])
    variant = Variant(score=score.alibi(slopes))
    check(variant, qkv())
    call = weakref.ref(next(iter(variant.calls.values())))
    count = len(kept._known)
    del variant
    gc.collect()
    assert len(kept._known) == count - 1 and call() is None


def test_so_many_calls_of_a_variant_are_kept(monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    variant = Variant(mask=mask.causal())
    for rows in (38, 39, 40):
        check(variant, qkv(rows))
    assert [key[0][1] for key in variant.calls][-2:] == [39, 40] and len(variant.calls) == 2


def test_calls_with_gradients_are_planned_once(planned):
    variant, tensors = Variant(), qkv()
    check(variant, tensors)
    for _ in range(2):
        q = tensors[0].detach().requires_grad_()
        assert attention(q, *tensors[1:], variant, backend="emulator").grad_fn is not None
    with torch.no_grad():
        assert attention(q, *tensors[1:], variant, backend="emulator").grad_fn is None
    assert calls(planned) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_a_recorded_call_are_the_operators(packed):
    """The output is the kernel's; the backward pass is told to run on the reference."""
    slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2]))
    variant = Variant(mask=mask.causal(), score=score.alibi(slopes))
    tensors, layout = qkv(), None
    if packed:
        tensors = [t[0] for t in tensors]
        layout = sequence.varlen(torch.tensor([0, 10, 40], dtype=torch.int32))
    wanted = [t.requires_grad_() for t in tensors] + [slopes]
    check(variant, tensors, layout)
    (prepared,) = (call.prepared for call in variant.calls.values())
    fields = (None,) * 7 if layout is None else tuple(vars(layout)[n] for n in LAYOUT)
    options = (*fields, variant.spec, None, "reference", False)
    out, lse, row_max = Recorded.apply(prepared, False, options, *tensors, *variant.arguments)
    assert row_max is None
    found = torch.autograd.grad(out.float().sin().sum() + lse.sin().sum(), wanted)
    out, lse = attention(*tensors, variant, layout=layout, backend="reference", return_lse=True)
    expected = torch.autograd.grad(out.float().sin().sum() + lse.sin().sum(), wanted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.02, rtol=0.02)


LAYOUT = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table", "max_seqlen_q",
    "max_seqlen_k",
)  # fmt: skip


def test_the_operator_finds_prepared_calls(planned):
    window = parameter(5)
    variant = Variant(mask=mask.define(lambda b, h, q, k: (q - k < window) & (k <= q)))
    cu = torch.tensor([0, 10, 40], dtype=torch.int32)
    tensors, layout = [t[0] for t in qkv()], sequence.varlen(cu)
    compiled = torch.compile(
        lambda *t: attention(*t, variant, layout=layout, backend="emulator"),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    first = compiled(*tensors)
    assert torch.equal(compiled(*tensors), first)
    assert torch.equal(check(variant, tensors, layout), first)
    assert calls(planned) == 1
    window.fill_(20)
    assert not torch.equal(compiled(*tensors), first)
    assert torch.equal(compiled(*tensors), check(variant, tensors, layout))
    assert calls(planned) == 2


def test_equal_variants_of_the_same_tensors_share_their_calls(planned):
    slopes = torch.tensor([0.1, 0.2])
    one, other = (Variant(score=score.alibi(slopes)) for _ in range(2))
    first = check(one, qkv())
    assert torch.equal(check(other, qkv()), first)
    del one
    gc.collect()
    assert torch.equal(check(other, qkv()), first)
    assert calls(planned) == 1
    check(Variant(score=score.alibi(slopes.clone())), qkv())
    assert calls(planned) == 2


def test_calls_are_planned_for_the_sms_of_the_open_session(planned):
    variant = Variant(mask=mask.causal())
    for sms in (1, 2, 1):
        with emulator(target="sm100", num_sms=sms):
            check(variant, qkv())
    assert calls(planned) == 2


def test_captured_parameters_are_recorded():
    slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2]))
    learned, plain = Variant(score=score.alibi(slopes)), qkv()
    with torch.no_grad():
        check(learned, plain)
    assert attention(*plain, learned, backend="emulator").grad_fn is not None


def test_modes_and_transforms_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    variant, tensors = Variant(), qkv()
    first = check(variant, tensors)
    with Watch():
        attention(*tensors, variant, backend="emulator")
    assert torch.ops.fa4core.forward.default in seen
    compiled = torch.compile(
        lambda *t: attention(*t, variant, backend="emulator"), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*tensors), first)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        batched = [t[None].expand(2, *t.shape) for t in tensors]
        torch.vmap(lambda *t: attention(*t, variant, backend="emulator"))(*batched)


def test_subclasses_and_inference_tensors():
    variant, tensors = Variant(mask=mask.causal()), qkv()
    first = check(variant, tensors)

    class Mine(torch.Tensor):
        pass

    mine = [t.as_subclass(Mine) for t in tensors]
    assert torch.equal(attention(*mine, variant, backend="emulator"), first)
    with torch.inference_mode():
        assert torch.equal(attention(*tensors, variant, backend="emulator"), first)
        ids = torch.zeros(40, dtype=torch.int32)
        documents = Variant(mask=mask.define(lambda b, h, q, k: ids[q] == ids[k]))
        before = check(documents, tensors)
        ids[20:] = 1  # no version tells: such a tensor takes the long way
        assert not torch.equal(check(documents, tensors), before)


def test_bad_arguments_are_refused_after_good_ones():
    variant, tensors = Variant(), qkv()
    check(variant, tensors, scale=1.0)
    with pytest.raises(TypeError, match="scale is a bool"):
        attention(*tensors, variant, scale=True, backend="emulator")
    with pytest.raises(TypeError, match="scale is a tensor"):
        attention(*tensors, variant, scale=torch.tensor(1.0), backend="emulator")
    for name in ("return_lse", "return_row_max", "deterministic"):
        with pytest.raises(TypeError, match=f"{name} is 1; a bool"):
            attention(*tensors, variant, scale=1.0, backend="emulator", **{name: 1})
    with pytest.raises(TypeError, match="q is a list"):
        attention([1], *tensors[1:], variant, backend="emulator")
    with pytest.raises(TypeError, match="variant is a function"):
        attention(*tensors, lambda b, h, q, k: q >= k, backend="emulator")
    with pytest.raises(ValueError, match="accepted are 'auto'"):
        attention(*tensors, variant, backend="cuda")
