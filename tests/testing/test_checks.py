"""`assert_variant_correct`, `check_gradients`, `check_tile_map` pass, and find faults."""

from __future__ import annotations

import attrs
import pytest
import torch

from fa4core import Variant
from fa4core.testing import (
    Case,
    LayoutSpec,
    Shape,
    assert_case_correct,
    assert_variant_correct,
    check_gradients,
    check_tile_map,
    plain,
    shapes_up_to,
)
from fa4core.testing import tilemap as tilemap_module
from fa4core.testing import whole as whole_module
from primitives import mask, score, sink
from primitives.expr.trace import Derivative

LEARNED = Variant(
    mask.causal() & mask.sliding_window(50),
    score.alibi((torch.arange(4) * 0.1).requires_grad_()) >> score.softcap(20.0),
    sink.learned(torch.zeros(4, requires_grad=True)),
)


def test_a_correct_variant_passes():
    assert_variant_correct(LEARNED)


def test_a_variant_made_for_each_shape():
    def make(shape: Shape) -> Variant:
        rows, columns = shape.limits.seqlen_q, shape.limits.seqlen_k
        return Variant(score=score.dense_bias(torch.ones(rows, columns).requires_grad_()))

    assert_variant_correct(make, shapes=shapes_up_to(max_seqlen=70), dtypes=("float32",))


def test_tables_that_are_too_small_are_explained():
    variant = Variant(score=score.head_scale(torch.ones(2)))
    with pytest.raises(IndexError, match="shapes_up_to"):
        assert_variant_correct(variant)
    assert_variant_correct(variant, shapes=shapes_up_to(heads_q=2, heads_kv=1, max_seqlen=70)[:2])


def _wrong_for_more_than_100_keys(q, k, v, variant, *, layout, scale):
    outputs = plain(q, k, v, variant, layout, scale=scale)
    long = k.dim() == 4 and k.shape[1] > 100
    return outputs.out * (0.9 if long else 1.0), outputs.lse, outputs.row_max


def test_a_fault_is_reported_with_what_to_run_again(monkeypatch):
    monkeypatch.setattr(whole_module, "by_backend", lambda *_, **__: _wrong_for_more_than_100_keys)
    with pytest.raises(AssertionError) as error:
        assert_variant_correct(LEARNED)
    text = str(error.value)
    assert "out: WRONG" in text and "assert_variant_correct(variant, shapes=[Shape(" in text
    assert "LayoutSpec(kind='varlen'" not in text  # those calls are right


def test_gradients_that_differ_between_runs_are_reported(monkeypatch):
    runs = iter(range(100))

    def attend(q, k, v, variant, *, layout, scale):
        out, lse, row_max = attrs.astuple(plain(q, k, v, variant, layout, scale=scale))
        return out * (1 + next(runs) * 1e-6), lse, row_max

    asked = []
    monkeypatch.setattr(whole_module, "by_backend", lambda *_, **o: asked.append(o) or attend)
    shapes = [Shape((9,), (9,))]
    assert_variant_correct(Variant(), shapes=shapes, layouts=[LayoutSpec()])
    with pytest.raises(AssertionError, match=r"not the same bits in two runs: out, .*dq") as error:
        assert_variant_correct(Variant(), shapes=shapes, deterministic=True)
    assert asked[-1] == {"deterministic": True}
    assert "deterministic=True)" in str(error.value)


def test_a_function_of_ones_own_can_be_checked():
    case = Case("Variant(mask=mask.causal())", Shape((9,), (130,)))
    with pytest.raises(AssertionError, match=r"assert_case_correct\(Case\("):
        assert_case_correct(case, attend=_wrong_for_more_than_100_keys)
    short = attrs.evolve(case, shape=Shape((9,), (9,)))
    assert_case_correct(short, attend=_wrong_for_more_than_100_keys)


def test_gradients_by_finite_differences():
    check_gradients(LEARNED, shape=Shape((5, 9), (7, 4), 4, 2, 8, 8))
    check_gradients(LEARNED, shape=Shape((5,), (7,), 4, 2, 8, 16), layout=LayoutSpec())


@pytest.mark.parametrize("fault", ["score", "captured"])
def test_a_wrong_derivative_is_found(fault):
    good = score.alibi((torch.arange(2) * 0.1).requires_grad_())
    rule = good.gradient()
    if fault == "score":
        wrong = attrs.evolve(rule, score=score.softcap(1.0).gradient().score)
    else:
        wrong = attrs.evolve(rule, captured=tuple((c, i, -node_of(d)) for c, i, d in rule.captured))
    broken = attrs.evolve(good, gradient_rule=lambda: wrong)
    assert isinstance(wrong, Derivative)
    with pytest.raises(AssertionError, match="finite differences"):
        check_gradients(Variant(score=broken))


def node_of(node):
    from primitives.expr import algebra

    class Negative:
        def __neg__(self):
            return algebra.neg(node)

    return Negative()


def test_captured_tensors_are_put_back():
    before = [t.detach().clone() for t in LEARNED.tensors]
    check_gradients(LEARNED, shape=Shape((5,), (7,), 4, 2, 8, 8))
    for kept, tensor in zip(before, LEARNED.tensors, strict=True):
        assert torch.equal(kept, tensor)


def test_a_sound_tile_map():
    found = check_tile_map(LEARNED, heads=2, seqlens_q=(300, 0), seqlens_k=(400, 5))
    assert found.sound and found.tiles == 24 and found.looseness == 0


@pytest.mark.parametrize("fault", ["empty", "full", "transposed"])
def test_an_unsound_tile_map_is_found(monkeypatch, fault):
    """Tile maps that drop a tile, that fill one, that disagree with their transpose."""
    real = tilemap_module.tile_map

    def broken(node, **options):
        changed = {"empty": mask.sliding_window(20), "full": mask.full()}.get(fault)
        found = real(node if changed is None else changed.expr, **options)
        if fault == "transposed":
            return _Transposed(found, real(mask.full().expr, **options).transpose())
        return found

    monkeypatch.setattr(tilemap_module, "tile_map", broken)
    found = check_tile_map(mask.causal())
    assert not found.sound and "WRONG" in str(found)
    expected = {"empty": "called EMPTY", "full": "called FULL", "transposed": "transposed"}[fault]
    assert expected in str(found)


class _Transposed:
    def __init__(self, found, turned):
        self.dense, self._turned = found.dense, turned

    def transpose(self):
        return self._turned
