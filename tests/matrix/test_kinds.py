"""Ways in which attention kernels are known to go wrong, one test each.

They hold for every backend; here the default one runs. Cases are small and readable on purpose.
"""

from __future__ import annotations

import math

import pytest
import torch
from calls import RAGGED, RICH, gradients, tensors

from fa4core import Variant, attention
from fa4core.testing import Case, LayoutSpec, Shape, assert_case_correct, by_backend, run
from primitives import mask, score, sequence, sparsity

LAYOUTS = ["seqused", "varlen", "varlen_seqused", "paged", "paged_varlen"]


# ------------------------------------------------------------------- padding and neighbours


@pytest.mark.parametrize("kind", LAYOUTS)
def test_nan_in_padding_and_unused_pages_reaches_nothing(kind):
    """The inputs of every case are NaN wherever no sequence is."""
    inputs = Case(RICH, RAGGED, LayoutSpec(kind, slack=7)).inputs()
    assert kind in ("varlen",) or inputs.k.isnan().any()
    for name, value in run(by_backend(), inputs).items():
        assert not value.isnan().any(), name


@pytest.mark.parametrize("kind", ["seqused", "varlen_seqused"])
def test_rows_behind_the_end_are_zero_and_their_lse_is_minus_infinity(kind):
    inputs = Case(RICH, RAGGED, LayoutSpec(kind, slack=7)).inputs()
    results = run(by_backend(), inputs)
    behind_q, behind_k = inputs.q.isnan().any(-1), inputs.k.isnan().any(-1)
    assert behind_q.any() and behind_k.any()
    for name, behind in (("out", behind_q), ("dq", behind_q), ("dk", behind_k), ("dv", behind_k)):
        assert (results[name][behind] == 0).all(), name
    assert (results["lse"].transpose(-1, -2)[behind_q] == -math.inf).all()
    assert (results["row_max"].transpose(-1, -2)[behind_q] == -math.inf).all()


def test_unused_pages_get_zero_gradients():
    inputs = Case(RICH, RAGGED, LayoutSpec("paged", page_size=16)).inputs()
    results = run(by_backend(), inputs)
    unused = inputs.k.isnan().flatten(1).all(1)
    assert unused.sum() == 2
    assert (results["dk"][unused] == 0).all() and (results["dv"][unused] == 0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["varlen", "paged", "seqused"])
def test_nan_in_one_sequence_stays_there(kind, poison):
    """0 * NaN is NaN: a tile's tail must not be multiplied away."""
    case = Case(RICH, RAGGED, LayoutSpec(kind))
    clean, dirty = case.inputs(), case.inputs()
    rows = {"varlen": slice(65, 68), "seqused": (1, slice(0, 3)), "paged": (1, slice(0, 3))}[kind]
    with torch.no_grad():
        dirty.q[rows] = poison
    expected, given = run(by_backend(), clean), run(by_backend(), dirty)
    spoilt = torch.zeros(clean.q.shape[:-1], dtype=torch.bool)
    spoilt[rows] = True
    for name in ("out", "dq"):
        assert torch.equal(given[name][~spoilt], expected[name][~spoilt]), name
    assert given["out"][spoilt].isnan().any() or poison == math.inf


def test_nan_in_masked_keys_of_empty_tiles_stays_out():
    """Keys that no query attends to are not read into any result."""
    q, k, v = tensors(64, 300)
    variant = Variant(mask.define(lambda b, h, q_idx, kv_idx: kv_idx < 128))
    expected = attention(q, k, v, variant)
    with torch.no_grad():
        k[:, 256:], v[:, 256:] = math.nan, math.nan
    assert torch.equal(attention(q, k, v, variant), expected)


# ---------------------------------------------------------------------- lengths, empty rows


@pytest.mark.parametrize("lengths", [((0,), (0,)), ((0,), (9,)), ((9,), (0,))])
@pytest.mark.parametrize("kind", ["fixed", "varlen", "paged"])
def test_nothing_to_do(lengths, kind):
    assert_case_correct(Case(RICH, Shape(*lengths, 4, 2, 16, 24), LayoutSpec(kind)))


@pytest.mark.parametrize("kind", ["varlen", "paged_varlen", "varlen_seqused"])
def test_empty_sequences_among_others(kind):
    shape = Shape((0, 5, 0, 130, 7, 0), (0, 0, 9, 64, 3, 0), 4, 2, 16, 24)
    assert_case_correct(Case(RICH, shape, LayoutSpec(kind, slack=1)))


def test_rows_with_nothing_to_attend_to():
    """Causal with fewer keys than queries: the first queries see no key."""
    q, k, v = tensors(130, 60)
    out, lse, row_max = attention(
        q, k, v, Variant(mask.causal()), return_lse=True, return_row_max=True
    )
    assert (out[:, :70] == 0).all() and (out[:, 70:].abs().amax(-1) > 0).all()
    assert (lse[..., :70] == -math.inf).all() and lse[..., 70:].isfinite().all()
    assert (row_max[..., :70] == -math.inf).all() and row_max[..., 70:].isfinite().all()
    dq, dk, dv = gradients(out, q, k, v)
    assert (dq[:, :70] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


def test_every_row_empty():
    q, k, v = tensors()
    out, lse = attention(q, k, v, Variant(~mask.full()), return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert all((g == 0).all() for g in gradients(out, q, k, v))


def test_empty_row_with_a_sink_has_the_sinks_lse():
    case = Case("Variant(mask=~mask.full(), sink=sink.constant(1.5))", Shape((5,), (9,)))
    results = run(by_backend(), case.inputs())
    assert (results["lse"] == 1.5).all() and (results["out"] == 0).all()
    assert_case_correct(case)


def test_score_mod_that_says_minus_infinity():
    """FlexAttention users mask in score mods: a row of -inf alone is an empty row."""
    text = (
        "Variant(score=score.define(lambda score, b, h, q_idx, kv_idx: "
        "torch.where((kv_idx <= q_idx - 70) | (q_idx == 3), -float('inf'), score)))"
    )
    assert_case_correct(Case(text, Shape((130,), (130,), 2, 1, 16, 16)))


# ------------------------------------------------------------------- masks, maps, backward


def test_a_users_mask_does_not_replace_causal():
    q, k, v = tensors()
    both = Variant(mask.causal() & mask.define(lambda b, h, q_idx, kv_idx: kv_idx % 3 != 0))
    dv = gradients(attention(q, k, v, both)[:, :10], v)[0]
    assert (dv[:, 10:] == 0).all() and (dv[:, 0:10:3] == 0).all() and (dv[:, 1] != 0).all()


@pytest.mark.parametrize("where", ["mask", "blocks", "score"])
def test_what_is_masked_gets_no_gradient(where):
    """A mask or a map that reaches the forward pass reaches the backward pass."""
    q, k, v = tensors(256, 256)
    even = torch.tensor([[True, False], [False, True]])
    variant = {
        "mask": Variant(mask.define(lambda b, h, q_idx, kv_idx: q_idx // 128 == kv_idx // 128)),
        "blocks": Variant(blocks=sparsity.from_blocks(even)),
        "score": Variant(score=score.define(
            lambda s, b, h, q_idx, kv_idx: torch.where(q_idx // 128 == kv_idx // 128, s, -math.inf)
        )),
    }[where]  # fmt: skip
    dk, dv = gradients(attention(q, k, v, variant)[:, :128], k, v)
    assert (dk[:, 128:] == 0).all() and (dv[:, 128:] == 0).all() and (dv[:, :128] != 0).all()


@pytest.mark.parametrize("lists", ["partial", "full", "both"])
@pytest.mark.parametrize("inner", ["mask.full()", "mask.causal()"])
@pytest.mark.parametrize("block", [64, 128, 50])
def test_block_lists(lists, inner, block):
    """Partial without full lists and the reverse; with a trivial mask; edges past the sequence."""
    count = -(-200 // block)
    some, more = (f"bits({s}, 1, 2, {count}, {count})" for s in (3, 4))
    blocks = {
        "partial": f"None, {some}", "full": f"{some}, None", "both": f"{some}, {more}",
    }[lists]  # fmt: skip
    text = f"Variant(mask={inner}, blocks=sparsity.BlockMap({blocks}, {block}, {block}))"
    assert_case_correct(Case(text, Shape((200,), (200,), 2, 1, 16, 16)))


def test_block_map_changes_the_result_of_a_trivial_mask():
    q, k, v = tensors(256, 256)
    blocks = sparsity.from_blocks(torch.tensor([[True, False], [True, True]]))
    assert not torch.allclose(attention(q, k, v, Variant(blocks=blocks)), attention(q, k, v))


def test_topk_blocks_with_padding_and_repeats():
    indices = torch.tensor([[0, 2, -1], [1, 1, -1], [-1, -1, -1], [3, 0, 0]])
    variant = Variant(blocks=sparsity.from_topk(indices, 4, 64, 32))
    allowed = torch.zeros(4, 4, dtype=torch.bool)
    for row, columns in enumerate(([0, 2], [1], [], [3, 0])):
        allowed[row, columns] = True
    allowed = allowed.repeat_interleave(64, 0).repeat_interleave(32, 1)
    q, k, v = tensors(256, 128)
    expected = attention(q, k, v, Variant(mask.dense(allowed)))
    assert torch.equal(attention(q, k, v, variant), expected)


# --------------------------------------------------------------------------------- strides


@pytest.mark.parametrize("strides", ["heads_first", "sliced", "misaligned", "expanded"])
@pytest.mark.parametrize("kind", ["fixed", "varlen", "paged"])
def test_strides_do_not_matter(strides, kind):
    """After a contiguous call, which may have filled a cache: the same numbers, bit by bit."""
    shape = Shape((65, 65), (129, 129), 4, 2, 16, 24)
    odd = Case(RICH, shape, LayoutSpec(kind), strides=strides).inputs()
    plain = Case(RICH, shape, LayoutSpec(kind), strides=strides).inputs()
    for name in ("q", "k", "v"):
        object.__setattr__(plain, name, getattr(plain, name).detach().contiguous().requires_grad_())
    assert any(not getattr(odd, n).is_contiguous() for n in ("q", "k", "v"))
    expected, given = run(by_backend(), plain), run(by_backend(), odd)
    for name, value in expected.items():
        assert torch.equal(given[name], value), name


def test_expanded_upstream_gradients():
    """`out.sum().backward()` passes a gradient with stride 0."""
    q, k, v = tensors()
    by_sum = torch.autograd.grad(attention(q, k, v).sum(), [q, k, v])
    for given, expected in zip(by_sum, gradients(attention(q, k, v), q, k, v), strict=True):
        assert torch.equal(given, expected)


def test_one_packed_tensor_for_queries_keys_and_values():
    qkv = torch.randn(2, 70, 3, 4, 16, requires_grad=True)
    q, k, v = qkv.unbind(2)
    expected = attention(*(t.contiguous() for t in (q, k, v)), Variant(mask.causal()))
    assert torch.equal(attention(q, k, v, Variant(mask.causal())), expected)
    (gradient,) = torch.autograd.grad(attention(q, k, v, Variant(mask.causal())).sum(), qkv)
    assert gradient.shape == qkv.shape and (gradient[:, :, 2] != 0).any()


def test_inputs_are_left_alone():
    inputs = Case(RICH, RAGGED, LayoutSpec("seqused")).inputs()
    kept = [t.detach().clone() for t in (inputs.q, inputs.k, inputs.v, *inputs.learned)]
    run(by_backend(), inputs)
    for before, after in zip(kept, (inputs.q, inputs.k, inputs.v, *inputs.learned), strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.detach().nan_to_num(7.0))


# ---------------------------------------------------------------------- numbers, statistics


@pytest.mark.parametrize("contents", ["large", "outliers", "constant", "zero"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_magnitudes(contents, dtype):
    assert_case_correct(Case(RICH, RAGGED, LayoutSpec("varlen"), dtype, contents))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_far_apart_between_tiles(dtype):
    """The running maximum jumps up and down by far more than any rescale threshold."""
    text = (
        "Variant(score=score.define(lambda score, b, h, q_idx, kv_idx: "
        "score + 40.0 * ((kv_idx // 128 * 5 + q_idx) % 7)), rescale_threshold={})"
    )
    for threshold in (0.0, 8.0, 60.0):
        case = Case(text.format(threshold), Shape((40,), (900,), 2, 1, 16, 16), dtype=dtype)
        assert_case_correct(case)


def test_lse_is_a_natural_logarithm():
    q, k, v = tensors(5, 9)
    _, lse = attention(q, k, v, return_lse=True)
    expected = (torch.einsum("bihd,bjhd->bhij", q, k) / 4.0).logsumexp(-1)
    torch.testing.assert_close(lse, expected)


def test_gradient_through_the_lse_alone():
    q, k, v = tensors(70, 130)
    _, lse = attention(q, k, v, return_lse=True)
    weight = torch.randn_like(lse)
    given = torch.autograd.grad((lse * weight).sum(), [q, k])
    plain = (torch.einsum("bihd,bjhd->bhij", q, k) / 4.0).logsumexp(-1)
    expected = torch.autograd.grad((plain * weight).sum(), [q, k])
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_row_max_is_of_the_modified_scores():
    q, k, v = tensors(5, 9)
    variant = Variant(score=score.define(lambda s, b, h, q_idx, kv_idx: -s))
    _, row_max = attention(q, k, v, variant, return_row_max=True)
    expected = -(torch.einsum("bihd,bjhd->bhij", q, k) / 4.0).amin(-1)
    torch.testing.assert_close(row_max, expected)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scales(scale):
    assert_case_correct(Case(RICH, RAGGED, LayoutSpec("varlen")), scale=scale)


def test_gqa_backward_is_bitwise_repeatable():
    inputs = Case(RICH, Shape((200,), (200,), 4, 1, 16, 16), dtype="bfloat16").inputs()
    first, second = (run(by_backend(deterministic=True), inputs) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("kind", ["varlen", "seqused", "paged"])
def test_layouts_of_one_batch_agree(kind):
    """Local indices and sequence numbers are the same, packed or not."""
    text = RICH.replace(
        "mask.causal()", "mask.causal() & mask.document(integers(0, 3, 130, high=2))"
    )
    results = {}
    for k in ("varlen_seqused", kind):
        inputs = Case(text, RAGGED, LayoutSpec(k, slack=3)).inputs()
        real = ~inputs.q.isnan().any(-1)
        results[k] = run(by_backend(), inputs)["out"][real]
    assert torch.equal(*results.values())


@pytest.mark.parametrize("policy", ["exp.polynomial(3)", "exp.mixed(5, 0.25)", "exp.polynomial(1)"])
def test_exp_policies_are_as_good_as_they_say(policy):
    text = RICH.replace("Variant(", f"Variant(exp={policy}, ")
    assert_case_correct(Case(text, RAGGED, LayoutSpec("varlen")))


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_split_keys_combine(splits):
    text = RICH.replace("Variant(", f"Variant(schedule=schedule.split_kv({splits}), ")
    assert_case_correct(Case(text, Shape((1, 3), (300, 0), 4, 2, 16, 24), LayoutSpec("varlen")))


def test_int64_lengths_are_accepted():
    q, k, v = (t[0] for t in tensors())
    ends = torch.tensor([0, 30, 70])
    given = attention(q, k, v, layout=sequence.varlen(ends))
    assert torch.equal(given, attention(q, k, v, layout=sequence.varlen(ends.int())))
