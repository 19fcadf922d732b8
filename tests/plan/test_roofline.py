"""The roofline against the paper's tables, and the work of score mods."""

import pytest
import torch

from fa4core.plan import roofline
from fa4core.plan.roofline import Work, work_of
from fa4core.plan.target import CPU, SM90, SM100, SM103, target
from fa4core.variant import Variant
from primitives import exp, mask, score


def paper(terms):
    return terms.mma, terms.smem, terms.exp


@pytest.mark.parametrize(("m", "expected"), [(128, (1024, 768, 1024)), (256, (2048, 1536, 2048))])
def test_table_1_forward(m, expected):
    assert paper(roofline.forward(SM100, m, 128, 128)) == expected


def test_table_3_backward():
    terms = roofline.backward(SM100, 128, 128, 128)
    assert paper(terms) == (2560, 3328, 1024)
    assert terms.bound == "smem"


def test_a_pair_shares_operands_and_halves_what_is_added_to_dq():
    """The paper's total, 2688, has B halved for all five products, and nothing else."""
    b, added, ds = (n * 128 * 128 // SM100.rates.smem_bytes for n in (2, 2 * 4, 2))
    assert 3328 - 5 * b // 2 == 2688
    exchanged = 2 * ds // 2  # half of dS goes, half of the other CTA's comes
    expected = 3328 - 4 * b // 2 - added // 2 + exchanged
    assert paper(roofline.backward(SM100, 128, 128, 128, ctas=2)) == (2560, expected, 1024)


@pytest.mark.parametrize("m", [128, 256, 512])
@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize("d", [64, 128])
def test_the_papers_forward_formulas(m, n, d):
    expected = (4 * m * n * d / 8192, 3 * m * n * d / 8192, m * n / 16)
    assert paper(roofline.forward(SM100, m, n, d)) == expected


@pytest.mark.parametrize(("m", "n", "d"), [(128, 128, 64), (128, 128, 128)])
def test_the_papers_backward_formula(m, n, d):
    expected = (4 * m * d + 3 * n * d + m * n) / 64 + m * n / 64 + m * d / 16
    assert roofline.backward(SM100, m, n, d).smem == expected


def test_unequal_head_dims():
    terms = roofline.forward(SM100, 128, 128, 192, 128)
    assert terms.mma == 2 * 128 * 128 * (192 + 128) / 8192
    assert roofline.backward(SM100, 128, 128, 192, 128).mma == 128 * 128 * 2 * (576 + 256) / 8192


def test_b300_has_twice_the_exponentials():
    assert roofline.forward(SM103, 128, 128, 128).exp == 512


def test_hopper_reads_b_again_for_every_64_rows():
    hopper, blackwell = (roofline.forward(t, 128, 128, 128) for t in (SM90, SM100))
    assert hopper.mma == 2 * blackwell.mma
    assert hopper.smem > blackwell.smem
    assert hopper.bound == "mma"


def test_emulation_moves_exponentials_to_the_fma_units():
    plain = roofline.forward(SM100, 128, 128, 128)
    mixed = roofline.forward(SM100, 128, 128, 128, exp=exp.mixed(3, 0.25))
    assert mixed.exp == 0.75 * plain.exp
    assert mixed.fma - plain.fma == 0.25 * 6 * 128 * 128 / 128
    assert roofline.forward(SM100, 128, 128, 128, exp=exp.polynomial()).exp == 0


def test_the_bound_is_named():
    assert roofline.forward(SM100, 128, 128, 64).bound == "exp"
    assert roofline.forward(SM100, 128, 128, 256).bound == "mma"
    assert roofline.forward(SM100, 128, 128, 128).cycles == 1024


@score.define
def softcap(score, b, h, q_idx, kv_idx):
    return torch.tanh(score / 30.0) * 30.0


def test_softcap_is_one_mufu_operation_and_two_multiplications():
    assert work_of(softcap.expr) == Work(mufu=1, fma=2)


def test_what_is_the_same_for_a_row_costs_nothing():
    slopes = torch.rand(8)
    per_head = score.define(lambda s, b, h, q_idx, kv_idx: s * torch.exp(slopes[h]))
    assert work_of(per_head.expr) == Work(fma=1)


def test_reads_of_captured_tensors_use_shared_memory_bandwidth():
    bias = torch.rand(64, 64)
    mod = score.define(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx, kv_idx])
    work = work_of(mod.expr)
    assert work.loads == 1
    assert work.fma == 1
    plain = roofline.forward(SM100, 128, 128, 128)
    assert roofline.forward(SM100, 128, 128, 128, work=work).smem - plain.smem == 512


def test_shared_subexpressions_count_once():
    twice = score.define(lambda s, b, h, q_idx, kv_idx: torch.tanh(s) + torch.tanh(s) * 2.0)
    assert work_of(twice.expr).mufu == 1


def test_a_masks_bounds_are_one_comparison_each():
    assert work_of(mask.causal().expr) == Work(alu=1)
    assert work_of((mask.causal() & mask.sliding_window(16, None)).expr) == Work(alu=2)
    assert work_of(mask.full().expr) == Work()
    strided = mask.define(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0)
    assert work_of(strided.expr) == Work(fma=2, alu=4)  # difference, remainder, comparison


def test_a_second_mufu_operation_becomes_the_bound():
    capped = roofline.forward(SM100, 128, 128, 128, work=work_of(softcap.expr))
    assert capped.bound == "exp"
    assert capped.exp == 2048


def test_targets_by_name():
    assert target("sm100") is SM100
    assert target(SM90) is SM90
    with pytest.raises(ValueError, match="'sm80'; accepted are sm100, sm103, sm90, cpu"):
        target("sm80")
    with pytest.raises(ValueError, match="has no roofline"):
        roofline.forward(CPU, 128, 128, 128)


@pytest.mark.parametrize(
    ("mod", "busy"),
    [(score.softcap(30.0), True), (score.alibi(8), False), (score.identity(), False)],
)
def test_a_score_mod_on_mufu_moves_exponentials_to_fma_units(mod, busy):
    assert roofline.needs_mufu(Variant(score=mod).graph.score) == busy
    assert SM100.exp(128, busy).fraction == (0.5 if busy else 0.125)
    assert SM90.exp(128, busy).fraction == 0.0
