"""The custom operators under torch's own checks: opcheck, gradcheck, compile, export."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from fa4core import Variant, attention
from fa4core.program import Program
from fa4core.reference.oracle import oracle
from primitives import exp, mask, schedule, score, sequence, sink, sparsity

F64 = torch.float64


def drawn(*shape, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype).requires_grad_()


def qkv(m=9, n=11, heads=4, heads_kv=2, dtype=F64):
    return [
        drawn(2, m, heads, 4, dtype=dtype),
        drawn(2, n, heads_kv, 4, dtype=dtype, seed=1),
        drawn(2, n, heads_kv, 3, dtype=dtype, seed=2),
    ]


def built(window, slopes, logits, cap=3.0):
    """A variant made of new closures at every call."""
    return Variant(
        mask=mask.causal() & mask.sliding_window(window),
        score=score.define(
            lambda s, b, h, q_idx, kv_idx: (
                cap * torch.tanh((s + slopes[h] * (kv_idx - q_idx)) / cap)
            )
        ),
        sink=sink.learned(logits),
    )


def operator_arguments(variant, tensors, layout=None):
    layout = layout or sequence.fixed()
    places = [getattr(layout, n) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q")]
    places += [layout.seqused_k, layout.page_table, layout.max_seqlen_q, layout.max_seqlen_k]
    return (*tensors, variant.arguments, *places, variant.spec, None, "reference", False)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    variant = built(5, drawn(4), drawn(4))
    torch.library.opcheck(torch.ops.fa4core.forward, operator_arguments(variant, qkv(dtype=dtype)))


def test_opcheck_packed_and_without_captured_tensors():
    cu = torch.tensor([0, 3, 9])
    q, k, v = (t[0].detach().requires_grad_() for t in qkv(9, 9))
    arguments = operator_arguments(Variant(), (q, k, v), sequence.varlen(cu))
    torch.library.opcheck(torch.ops.fa4core.forward, arguments)


def test_opcheck_of_the_backward_operator():
    variant = built(5, drawn(4).detach(), drawn(4).detach().requires_grad_())
    q, k, v = (t.detach() for t in qkv())
    arguments = operator_arguments(variant, (q, k, v))
    out, lse, _ = torch.ops.fa4core.forward(*arguments)
    rest = ([t.detach() for t in arguments[3]], *arguments[4:])
    with_gradients = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out.detach())
    torch.library.opcheck(torch.ops.fa4core.backward, (*with_gradients, lse.detach(), *rest))


def test_gradcheck_of_everything_that_learns():
    slopes, logits, bias = drawn(2), drawn(2), drawn(2, 4, 5)
    variant = Variant(
        mask=mask.causal() & mask.sliding_window(5),
        score=score.define(
            lambda s, b, h, q_idx, kv_idx: torch.tanh(
                s + slopes[h] * (kv_idx - q_idx) + bias[h, q_idx, kv_idx]
            )
        ),
        sink=sink.learned(logits),
    )

    def function(q, k, v, *_):
        return attention(q, k, v, variant, return_lse=True)

    inputs = (t.detach()[:1].requires_grad_() for t in qkv(4, 5, 2, 1))
    assert torch.autograd.gradcheck(function, (*inputs, slopes, logits, bias))


def test_gradcheck_with_rows_without_keys_and_packed():
    cu_q, cu_k = torch.tensor([0, 3, 5]), torch.tensor([0, 2, 6])
    q, k, v = (t.detach()[0].requires_grad_() for t in qkv(6, 6, 2, 1))

    def function(q, k, v):
        layout = sequence.varlen(cu_q, cu_k, seqused_k=torch.tensor([2, 3]))
        out, lse = attention(q, k, v, Variant(mask=mask.causal()), layout=layout, return_lse=True)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(function, (q, k, v))


def test_there_is_no_second_derivative_and_it_is_said():
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*oracle"):
        grad.sum().backward()


def test_a_captured_tensor_without_gradient_costs_none_and_row_max_has_none():
    q, k, v = qkv()
    out, row_max = attention(
        q, k, v, built(5, drawn(4).detach(), drawn(4).detach()), return_row_max=True
    )
    assert out.requires_grad and not row_max.requires_grad


# --------------------------------------------------------------------------------- compilation


def check_against_the_oracle(function, variant, learned):
    inputs = qkv()
    out, lse = function(*inputs, variant)
    expected, expected_lse, _ = oracle(*inputs, variant)
    torch.testing.assert_close((out, lse), (expected, expected_lse))
    ours = torch.autograd.grad(out.sum() + lse.sum(), inputs + learned)
    theirs = torch.autograd.grad(expected.sum() + expected_lse.sum(), inputs + learned)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph_and_nothing_recompiles_for_new_closures(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def function(q, k, v, variant):
        return attention(q, k, v, variant, return_lse=True)

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for window in (3, 5, 2):
        learned = [drawn(4, seed=window), drawn(4, seed=window + 1)]
        check_against_the_oracle(compiled, built(window, *learned), learned)
    assert counter.frame_count == 1
    compiled(*qkv(), built(3, *learned, cap=4.0))  # another function, though
    assert counter.frame_count == 2


def test_compile_with_a_layout_made_inside():
    torch._dynamo.reset()
    counter = CompileCounter()
    variant = Variant(mask=mask.causal())

    def function(q, k, v, cu):
        return attention(q, k, v, variant, layout=sequence.varlen(cu), scale=0.3)

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    tensors = [t[0] for t in qkv(9, 9)]
    for ends in ([0, 4, 9], [0, 1, 9], [0, 0, 9]):
        cu = torch.tensor(ends)
        torch.testing.assert_close(compiled(*tensors, cu), function(*tensors, cu))
    assert counter.frame_count == 1


def test_compile_lets_lengths_vary():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    q, k, v = qkv(9, 9)
    for n in (9, 8, 7, 6, 5):
        assert compiled(q[:, :n], k[:, :n], v[:, :n]).shape == (2, n, 4, 3)
    assert counter.frame_count <= 2  # once for the first lengths, once for any


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes, self.logits = torch.nn.Parameter(drawn(4)), torch.nn.Parameter(drawn(4))
        self.variant = built(5, self.slopes, self.logits)

    def forward(self, q, k, v):
        return attention(q, k, v, self.variant, return_lse=True)


def test_a_module_compiles_and_its_parameters_learn():
    torch._dynamo.reset()
    layer = Layer()
    out, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(*qkv())
    out.sum().backward()
    by_hand = Layer()
    by_hand.load_state_dict(layer.state_dict())
    oracle(*qkv(), by_hand.variant)[0].sum().backward()
    torch.testing.assert_close(layer.slopes.grad, by_hand.slopes.grad)
    torch.testing.assert_close(layer.logits.grad, by_hand.logits.grad)


def test_export_keeps_the_operator_and_the_parameters():
    torch._dynamo.reset()
    layer = Layer()
    program = torch.export.export(layer, tuple(qkv()))
    assert {n for n, _ in program.named_parameters()} == {"slopes", "logits"}
    assert "fa4core.forward" in str(program.graph)
    torch.testing.assert_close(program.module()(*qkv()), layer(*qkv()))


# -------------------------------------------------------------------------------- compile keys


def test_new_closures_windows_and_tensors_have_one_key():
    one = built(3, drawn(4), drawn(4))
    two = built(700, drawn(8, seed=1), drawn(8, seed=2))
    assert one.key == two.key and one.spec == two.spec
    assert one.arguments[0] is not two.arguments[0]


def test_what_is_compiled_in_is_in_the_key():
    base = built(3, drawn(4), drawn(4))
    others = [
        built(3, drawn(4), drawn(4), cap=4.0),
        built(3, drawn(4, dtype=torch.float32), drawn(4)),
        Variant(base.mask, base.score),
        Variant(base.mask, base.score, base.sink, exp=exp.mixed()),
        Variant(base.mask, base.score, base.sink, rescale_threshold=3.0),
        Variant(
            base.mask,
            base.score,
            base.sink,
            blocks=sparsity.from_blocks(torch.ones(1, 1, dtype=torch.bool)),
        ),
    ]
    assert len({v.key for v in [base, *others]}) == 1 + len(others)


def test_two_lambdas_with_other_defaults_are_two():
    one = Variant(score=score.define(lambda s, b, h, q_idx, kv_idx, cap=2.0: s * cap))
    two = Variant(score=score.define(lambda s, b, h, q_idx, kv_idx, cap=3.0: s * cap))
    assert one.key != two.key and one.spec != two.spec
    q, k, v = qkv()
    assert not torch.allclose(attention(q, k, v, one), attention(q, k, v, two))


def test_a_program_is_read_back_as_it_was_written():
    slopes, logits = drawn(4), drawn(4)
    base = built(5, slopes, logits)
    variant = Variant(
        base.mask,
        base.score,
        base.sink,
        exp=exp.mixed(2, 0.25),
        rescale_threshold=4.0,
        schedule=schedule.split_kv(3),
    )
    read = Program.parse(variant.spec, variant.arguments)
    assert read.dump() == variant.spec
    assert read.graph.roots == variant.graph.roots
    assert (read.exp, read.rescale_threshold) == (exp.mixed(2, 0.25), 4.0)
    assert read.schedule == schedule.split_kv(3)
    assert [c.tensor for c, _, _ in read.score_gradient.captured] == [slopes]
    assert [c.tensor for c, _, _ in read.sink_gradient.captured] == [logits]


def test_one_tensor_in_two_places_gets_one_gradient():
    table = drawn(4)
    variant = Variant(
        score=score.define(lambda s, b, h, q_idx, kv_idx: s * table[h]), sink=sink.learned(table)
    )
    inputs = qkv()
    ours = torch.autograd.grad(attention(*inputs, variant).sum(), table)
    theirs = torch.autograd.grad(oracle(*inputs, variant)[0].sum(), table)
    torch.testing.assert_close(ours, theirs)
