"""The public entry point: shapes, defaults, backends, and errors that say what to do."""

import math

import pytest
import torch

from fa4core import Problem, Support, Variant, attention, supports
from fa4core.reference.oracle import oracle
from primitives import exp, mask, parameter, schedule, score, sequence, sink, sparsity


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


Q, K, V = drawn(2, 5, 4, 8), drawn(2, 7, 2, 8), drawn(2, 7, 2, 6)
CU = torch.tensor([0, 2, 5])


def test_a_variant_in_six_lines():
    slopes = 2.0 ** -torch.arange(1, 5)
    variant = Variant(
        mask=mask.causal() & mask.sliding_window(3),
        score=score.alibi(slopes) >> score.softcap(30.0),
    )
    torch.testing.assert_close(attention(Q, K, V, variant), oracle(Q, K, V, variant)[0].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shapes_and_dtypes(dtype):
    q, k, v = (t.to(dtype) for t in (Q, K, V))
    out, lse, row_max = attention(q, k, v, return_lse=True, return_row_max=True)
    assert out.shape == (2, 5, 4, 6) and out.dtype == dtype
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    for t in (lse, row_max):
        assert t.shape == (2, 4, 5) and t.dtype == statistics and t.is_contiguous()
    assert isinstance(attention(q, k, v), torch.Tensor)
    assert torch.equal(attention(q, k, v, return_row_max=True)[1], row_max)
    assert torch.equal(attention(q, k, v, return_lse=True)[1], lse)
    packed = attention(q[0], k[0], v[0], layout=sequence.varlen(CU, CU + CU // 3), return_lse=True)
    assert packed[0].shape == (5, 4, 6) and packed[1].shape == (4, 5)


def test_deterministic_is_accepted():
    assert torch.equal(attention(Q, K, V, deterministic=True), attention(Q, K, V))


def test_inputs_are_left_alone():
    table = drawn(4)
    before = [t.clone() for t in (Q, K, V, table)]
    attention(Q, K, V, Variant(score=score.define(lambda s, b, h, i, j: table[h])))
    scalar = parameter(2.0)
    attention(Q, K, V, Variant(score=score.define(lambda s, b, h, i, j: scalar)))
    assert scalar == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, (Q, K, V, table), strict=True))


def test_a_new_value_of_a_parameter_is_seen():
    window = torch.tensor(1)
    variant = Variant(mask=mask.causal() & mask.sliding_window(window))
    narrow = attention(Q, K, V, variant)
    window.fill_(3)
    wide = Variant(mask=mask.causal() & mask.sliding_window(3))
    assert torch.equal(attention(Q, K, V, variant), attention(Q, K, V, wide))
    assert not torch.equal(attention(Q, K, V, variant), narrow)


# ------------------------------------------------------------------------------------ backends


def test_auto_takes_the_reference_on_a_cpu():
    assert torch.equal(attention(Q, K, V), attention(Q, K, V, backend="reference"))
    answer = supports(Variant(), Problem.from_tensors(Q, K, V))
    assert answer and answer.reason == "reference: the tensors are on the CPU"


@pytest.mark.parametrize("backend", ["sm100", "sm90"])
def test_a_backend_that_can_not_run_here_is_refused(backend):
    with pytest.raises(NotImplementedError, match=f"{backend}.*use backend='reference'"):
        attention(Q, K, V, backend=backend)
    answer = supports(Variant(), Problem.from_tensors(Q, K, V), backend)
    assert isinstance(answer, Support) and not answer and backend in answer.reason


def test_an_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="backend='cuda'; accepted are 'auto', 'sm100'"):
        attention(Q, K, V, backend="cuda")


def test_on_a_gpu_auto_says_what_it_chose_and_why():
    from fa4core.backends import announce, choose

    chosen, why = choose("auto", torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="takes 'reference', because .*cuda:0.*no kernels"):
        announce(chosen, why)


@pytest.mark.parametrize("capability, backend", [((9, 0), "sm90"), ((10, 0), "sm100")], ids=str)
def test_on_a_gpu_with_kernels_auto_takes_them(monkeypatch, capability, backend):
    from fa4core import backends

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(backends, "_has_compiler", lambda: True)
    assert backends.choose("auto", torch.device("cuda", 0))[0] == backend
    monkeypatch.setattr(backends, "_has_compiler", lambda: False)
    chosen, why = backends.choose("auto", torch.device("cuda", 0))
    assert chosen == "reference" and "pip install nvidia-cutlass-dsl" in why


def test_what_a_variant_cannot_do_supports_says():
    problem = Problem.from_tensors(Q, K, V)
    answer = supports(Variant(sink=sink.learned(drawn(3))), problem)
    assert not answer and "3 logits for 4 query heads" in answer.reason


# -------------------------------------------------------------------------------------- errors


def test_types():
    with pytest.raises(TypeError, match="q is a ndarray; a torch tensor"):
        attention(Q.numpy(), K, V)
    with pytest.raises(TypeError, match=r"variant is a function.*Variant\(mask=mask.define"):
        attention(Q, K, V, lambda b, h, q, k: q >= k)
    for part, place in ((mask.causal(), "mask"), (score.softcap(3.0), "score")):
        with pytest.raises(TypeError, match=rf"a Variant is accepted; make .*Variant\({place}="):
            attention(Q, K, V, part)
    with pytest.raises(TypeError, match=r"variant is a Layout; .*layout=\.\.\."):
        attention(Q, K, V, sequence.fixed())
    with pytest.raises(TypeError, match=r"layout is a Tensor; .*sequence\.varlen"):
        attention(Q, K, V, layout=CU)
    with pytest.raises(TypeError, match=r"q is torch\.int64"):
        attention(Q.long(), K.long(), V.long())
    with pytest.raises(TypeError, match=r"q is torch\.float16 and k is torch\.float32"):
        attention(Q.half(), K, V)


@pytest.mark.parametrize(
    "scale, error, message",
    [
        (torch.tensor(1.0), TypeError, r"scale is a tensor.*score\.define"),
        ("1", TypeError, "scale is a str"),
        (True, TypeError, "scale is a bool"),
        (math.nan, ValueError, "scale=nan; a finite number"),
        (math.inf, ValueError, "scale=inf"),
        (10**400, ValueError, "scale=an int of 1329 bits; at most"),
    ],
)
def test_scales(scale, error, message):
    with pytest.raises(error, match=message):
        attention(Q, K, V, scale=scale)


@pytest.mark.parametrize(
    "tensors, layout, message",
    [
        ((Q[0], K, V), None, r"q has shape \(5, 4, 8\); .*\(batch, seqlen_q, heads, d\)"),
        ((Q[0], K[0], V[0]), None, r"packed tensors need layout=sequence\.varlen"),
        ((Q, K, V[:, :6]), None, "all but the last dimension"),
        ((Q[..., :4], K, V), None, "q has head dim 4 and k 8"),
        ((Q[:, :, :3], K, V), None, "3 query heads on 2 KV heads"),
        ((Q[:1], K, V), None, "q has batch 1 and k 2"),
        ((Q[..., :0], K[..., :0], V), None, "head dims 0 and 6"),
        ((Q, K, V), sequence.varlen(CU), r"with this layout \(total_q, heads, d\)"),
        ((Q[0], K[0], V[0]), sequence.varlen(CU + 1), "must start with 0"),
        ((Q[0], K[0], V[0]), sequence.varlen(CU.flip(0) - 5), "must start with 0"),
        ((Q[0], K[0], V[0]), sequence.varlen(2 * CU), "ends at 10, but q has 5 rows"),
        ((Q[0], K[0], V[0]), sequence.varlen(CU, CU[:2]), "q has 2 sequences and k has 1"),
        ((Q[0], K[0], V[0]), sequence.varlen(CU, max_seqlen_q=2), "max_seqlen_q=2.*length 3"),
        ((Q, K, V), sequence.fixed(None, torch.tensor([7, 8])), r"seqused_k\[1\] is 8.*0\.\.7"),
        ((Q, K, V), sequence.fixed(torch.tensor([5])), "seqused_q has 1 entry for 2 sequences"),
        (
            (Q, K, V),
            sequence.paged(torch.tensor([[0, 1], [2, 0]]), torch.tensor([9, 3])),
            r"page_table\[1\] names pages 2\.\.2; pages 0\.\.1 exist",
        ),
    ],
)
def test_shapes_and_layouts(tensors, layout, message):
    with pytest.raises(ValueError, match=message):
        attention(*tensors, layout=layout)


def test_captured_tensors_that_are_too_small():
    by_head, by_key, by_sequence, square = drawn(3), drawn(6), drawn(1), drawn(5, 5)
    blocks = torch.ones(1, 3, dtype=torch.bool)
    cases = [
        (Variant(score=score.define(lambda s, b, h, i, j: s * by_head[h])), "4 query heads"),
        (Variant(mask=mask.define(lambda b, h, i, j: by_key[j] > 0)), "7 keys"),
        (Variant(mask=mask.define(lambda b, h, i, j: by_sequence[b] > 0)), "2 sequences"),
        (
            Variant(score=score.define(lambda s, b, h, i, j: s + square[i, j])),
            r"indices 0\.\.4 \(and -5\.\.-1, .*`kv_idx` runs over 5\.\.6",
        ),
        (
            Variant(score=score.define(lambda s, b, h, i, j: s + by_head[-h - 1])),
            r"indices 0\.\.2 \(and -3\.\.-1, .*runs over -4\.\.-1 for 4 query heads",
        ),
        (Variant(blocks=sparsity.from_blocks(blocks, 4, 2)), r"`q_idx // 4`.*0\.\.1.*5 queries"),
    ]
    for variant, message in cases:
        with pytest.raises(IndexError, match=message):
            attention(Q, K, V, variant)


def test_captured_tensors_elsewhere():
    table = torch.zeros(4, device="meta")
    variant = Variant(score=score.define(lambda s, b, h, i, j: s + table[h]))
    with pytest.raises(ValueError, match="is on meta and the queries on cpu"):
        attention(Q, K, V, variant)


def test_a_tensor_that_learns_too_late():
    table = drawn(4)
    variant = Variant(score=score.define(lambda s, b, h, i, j: s + table[h]))
    attention(Q, K, V, variant)
    table.requires_grad_()
    with pytest.raises(ValueError, match="before defining it"):
        attention(Q, K, V, variant)


def test_policies_that_overflow():
    half = [t.half() for t in (Q, K, V)]
    attention(*half, Variant(rescale_threshold=15.0))
    with pytest.raises(ValueError, match=r"rescale_threshold=16.0 with torch.float16.*15.0"):
        attention(*half, Variant(rescale_threshold=16.0))


def test_all_policies_are_accepted_together():
    variant = Variant(
        mask=mask.causal(),
        exp=exp.mixed(3, 0.25),
        rescale_threshold=4.0,
        schedule=schedule.split_kv(2),
    )
    torch.testing.assert_close(
        attention(Q, K, V, variant), oracle(Q, K, V, variant)[0].float(), atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("which", [1, 2])
def test_a_meta_tensor_among_real_ones_is_refused(which):
    tensors = [torch.randn(1, 8, 2, 8) for _ in range(3)]
    tensors[which] = tensors[which].to("meta")
    with pytest.raises(ValueError, match="move them to one device"):
        attention(*tensors)


def test_meta_tensors_are_refused():
    x = torch.empty(1, 8, 2, 8, device="meta")
    with pytest.raises(ValueError, match="hold no values"):
        attention(x, x, x)


@pytest.mark.parametrize(
    "given",
    [{"backend": None}, {"deterministic": "yes"}, {"return_lse": "no"}, {"return_row_max": 0}],
)
def test_options_of_another_type_are_refused(given):
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(TypeError, match=f"{next(iter(given))} is .*is accepted"):
        attention(q, q, q, **given)


def test_forward_mode_is_refused():
    """torch would make the derivative zero, silently."""
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: attention(q, t, q), (q,), (q,))
