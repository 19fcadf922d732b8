"""What explain() says, against brute force where it counts something."""

import math

import attrs
import pytest
import torch

from fa4core import Problem, Variant, attention, explain, supports
from fa4core.plan import findings
from fa4core.plan.plan import plan
from fa4core.plan.strides import copy_reason, stride_class
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, tile_map
from primitives import exp, mask, score, sequence, sink
from primitives.schedule import Schedule
from primitives.score.core import named


def problem(q, k, *, batch=1, heads=2, kv=None, d=64):
    return Problem(batch, heads, kv or heads, d, d, (q,) * batch, (k,) * batch)


def tensors(q=256, k=256, *, batch=1, heads=2, kv=2, d=64):
    return (
        torch.zeros(batch, q, heads, d, dtype=torch.bfloat16),
        torch.zeros(batch, k, kv, d, dtype=torch.bfloat16),
        torch.zeros(batch, k, kv, d, dtype=torch.bfloat16),
    )


softcap = named("softcap", lambda s, b, h, q_idx, kv_idx: 30.0 * torch.tanh(s / 30.0))
distance = named("distance", lambda s, b, h, q_idx, kv_idx: s - 0.5 * (q_idx - kv_idx).abs())


# ------------------------------------------------------------------------------ empty rows


def rows_by_brute_force(definition, q, k, heads):
    index = torch.arange(q)[:, None], torch.arange(k)[None, :]
    return sum(int((~definition(0, h, *index).expand(q, k).any(dim=1)).sum()) for h in range(heads))


EVERY_SEVENTH = torch.arange(300) % 7 == 0
MASKS = {
    "stripes": lambda b, h, q_idx, kv_idx: (q_idx % 3 == 0) & (kv_idx % 5 == q_idx % 5),
    "nothing": lambda b, h, q_idx, kv_idx: (q_idx < 0) & (kv_idx >= 0),
    "far": lambda b, h, q_idx, kv_idx: kv_idx - q_idx >= 150,
    "by head": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx >= 0) & (q_idx >= h * 100),
    "table": lambda b, h, q_idx, kv_idx: EVERY_SEVENTH[q_idx] & (kv_idx <= q_idx),
    "everything": lambda b, h, q_idx, kv_idx: q_idx + kv_idx >= 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_empty_rows(name):
    built = mask.define(MASKS[name])
    tiles = tile_map(built.expr, batch=1, heads=3, seqlens_q=[300], seqlens_k=[200])
    found = findings.empty_rows(built.expr, tiles)
    expected = rows_by_brute_force(MASKS[name], 300, 200, 3)
    assert (found.at_least, found.at_most, found.rows) == (expected, expected, 900)
    if expected:
        b, h, query = found.example
        row = MASKS[name](b, h, torch.tensor(query), torch.arange(200))
        assert not row.any()


def test_empty_rows_without_a_budget_are_bounds():
    built = mask.define(MASKS["stripes"])
    tiles = tile_map(built.expr, batch=1, heads=3, seqlens_q=[300], seqlens_k=[200])
    found = findings.empty_rows(built.expr, tiles, budget=0)
    assert (found.at_least, found.at_most) == (0, 900)
    assert str(found) == "at most 900 of 900"


def test_more_queries_than_keys_leave_causal_rows_empty():
    found = explain(Variant(mask=mask.causal()), problem=problem(1000, 600))
    assert found.empty_rows.at_least == found.empty_rows.at_most == 2 * 400
    assert "800 of 2,000 rows have nothing to attend to (O = 0, LSE = -inf)" in str(found).replace(
        "\n    ", " "
    )
    with_sink = Variant(mask=mask.causal(), sink=sink.constant(0.0))
    assert any("LSE = the sink" in w for w in explain(with_sink, problem=problem(9, 6)).warnings)


def test_lengths_of_zero():
    found = explain(Variant(mask=mask.causal()), problem=problem(100, 0))
    assert found.empty_rows.at_least == 200
    none = explain(Variant(mask=mask.causal()), problem=problem(0, 100))
    assert (none.empty_rows.rows, none.skipped) == (0, 0.0)
    assert explain(Variant(), problem=problem(5, 5, batch=0)).empty_rows.rows == 0


def test_an_empty_batch_is_explained():
    causal = Variant(mask=mask.causal())
    packed = torch.ones(0, 3, 8)
    for found in (
        causal.explain(*[torch.ones(0, 8, 3, 8)] * 3),
        causal.explain(problem=problem(5, 5, batch=0)),
        causal.explain(*[packed] * 3, layout=sequence.varlen(torch.zeros(1, dtype=torch.int32))),
    ):
        assert "0 sequences of 0 queries" in str(found)


# ------------------------------------------------------------------------------- findings


def test_a_cap_that_levels_out_a_bias():
    steep = named("steep", lambda s, b, h, q_idx, kv_idx: s - 2.0 * (q_idx - kv_idx))
    capped = Variant(mask=mask.causal(), score=steep >> score.softcap(30.0))
    (pair,) = explain(capped, problem=problem(256, 256)).flattened
    assert (pair.first, pair.second) == ("steep", "softcap(30.0)") and 0.5 < pair.share < 1
    assert "write softcap(30.0) >> steep" in str(pair)
    near = attrs.evolve(capped, mask=mask.causal() & mask.sliding_window(4))
    for fine in (near, Variant(mask=mask.causal(), score=score.softcap(30.0) >> steep)):
        assert findings.flattened(fine, problem(256, 256)) == []


def test_score_mods_that_level_out_nothing():
    twice = named("twice", lambda s, b, h, q_idx, kv_idx: s * 2.0)
    thrice = named("thrice", lambda s, b, h, q_idx, kv_idx: 3.0 * s)
    less = named("less", lambda s, b, h, q_idx, kv_idx: 0.01 * s)
    chains = (distance >> distance, twice >> thrice, softcap, score.identity() >> softcap)
    for chain in (*chains, distance >> less):
        assert findings.flattened(Variant(score=chain), problem(64, 64)) == []


def test_captured_tensors_indexed_outside():
    table = torch.zeros(90, 100)
    mod = score.define(lambda s, b, h, q_idx, kv_idx: s + table[q_idx, kv_idx])
    found = explain(Variant(score=mod), problem=problem(100, 100))
    (outside,) = found.out_of_range
    assert (outside.where, outside.dim, outside.size) == ("score mod", 0, 90)
    assert (outside.low, outside.high) == (0, 99)
    assert explain(Variant(score=mod), problem=problem(90, 100)).out_of_range == ()
    chain = explain(Variant(score=mod >> softcap), problem=problem(100, 100))
    assert chain.out_of_range and not chain.flattened  # not probed: it can't be evaluated


def test_a_mask_that_leaves_its_table_is_explained_all_the_same():
    table = torch.ones(50, dtype=torch.bool)
    wild = Variant(mask=mask.define(lambda b, h, q_idx, kv_idx: table[kv_idx]))
    found = explain(wild, problem=problem(64, 64))
    assert found.out_of_range
    assert not found.chosen.ok
    assert any("would fail" in w for w in found.warnings)


def test_masks_through_the_score_mod():
    through = score.define(
        lambda s, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, s, -float("inf"))
    )
    found = explain(Variant(score=through), problem=problem(64, 64))
    assert any("without skipping tiles" in w for w in found.warnings)


def test_masks_without_effect_or_keys():
    everything = Variant(mask=mask.sliding_window(10_000, 10_000))
    assert any("no effect" in w for w in explain(everything, problem=problem(64, 64)).warnings)
    nothing = Variant(mask=mask.causal() & mask.define(lambda b, h, q_idx, kv_idx: kv_idx > q_idx))
    assert any("nothing at all" in w for w in explain(nothing, problem=problem(64, 64)).warnings)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, 8, 4, 64), None),
        (torch.zeros(2, 4, 8, 64).transpose(1, 2), None),
        (torch.zeros(2, 8, 1, 64).expand(2, 8, 4, 64), None),
        (torch.zeros(0, 8, 4, 64)[..., ::2], None),
        (torch.zeros(2, 8, 4, 64).transpose(2, 3), "last dimension has stride 64"),
        (torch.zeros(2, 8, 4, 128)[..., ::2], "last dimension has stride 2"),
        (torch.zeros(2, 8, 4, 66)[..., :64], "stride of 264 bytes"),
        (torch.zeros(2, 8, 4, 68)[..., 1:65], "4 bytes off"),
        (torch.zeros(2, 8, 4, 5), "stride of 20 bytes"),
    ],
)
def test_inputs_that_need_a_copy(tensor, reason):
    found = copy_reason(tensor)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found
    assert (stride_class(tensor) == "copied") == (reason is not None)


def test_explain_says_what_is_copied():
    q, k, _ = tensors()
    padded = torch.zeros(1, 256, 2, 68, dtype=torch.bfloat16)[..., 2:66]
    found = explain(Variant(), q, k, padded)
    assert list(found.copies) == ["v"]
    assert any(w.startswith("v is copied") for w in found.warnings)


# ------------------------------------------------------------------------ tiles, path, cost


def test_tiles_by_kind():
    found = explain(Variant(mask=mask.causal()), problem=problem(1024, 1024))
    assert found.tiles == {EMPTY: 2 * 28, PARTIAL: 2 * 8, FULL: 2 * 28}
    assert found.skipped == 56 / 128


def test_the_path_and_why():
    found = explain(Variant(), *tensors())
    assert found.chosen.backend == "reference"
    assert "CPU" in found.chosen.reason
    assert {p.backend for p in found.paths} == {"sm100", "sm90", "reference", "emulator"}
    # What explain promises is what the call does.
    assert attention(*tensors(), Variant()).shape == (1, 256, 2, 64)


def test_what_computes_the_gradients():
    """Shown where it is not what computes the output."""
    pages = torch.zeros(8, 64, 2, 64, dtype=torch.bfloat16)
    layout = sequence.paged(
        torch.arange(8, dtype=torch.int32).reshape(2, 4),
        torch.tensor([200, 256], dtype=torch.int32),
    )
    paged = torch.zeros(2, 1, 2, 64).bfloat16(), pages, pages
    found = explain(Variant(), *paged, layout=layout)
    assert found.gradients.backend == "reference" and found.gradients.ok
    assert "gradients  " not in str(found)
    found = explain(Variant(), *paged, layout=layout, backend="emulator")
    assert found.chosen.ok and not found.gradients.ok
    assert "gradients    none: " in str(found)
    sizes = Problem.from_tensors(*paged, layout)
    assert supports(Variant(), sizes, "emulator")
    assert not supports(Variant(), sizes, "emulator", gradients=True)


def test_a_call_that_would_fail_says_so_first():
    short = Variant(score=score.alibi(torch.ones(3)))
    found = short.explain(*tensors(heads=4, kv=4))
    assert found.warnings[0].startswith("This call would fail: ") and len(found.warnings) > 1
    assert "path         none: this call would fail. reference refuses it: dimension 0" in str(
        found
    )
    assert "reference: the tensors" not in str(found)


def test_every_backend_has_a_line():
    shown = [x.split() for x in str(explain(Variant(), *tensors())).splitlines()]
    for name in ("sm100", "sm90", "emulator"):
        assert any(words[:1] == [f"{name}:"] for words in shown)
    asked = str(explain(Variant(), *tensors(), backend="sm100"))
    assert "none: this call would fail. sm100 refuses it: the tensors are on cpu" in asked
    assert "reference: possible" in asked


def test_costs_are_of_the_kernels_dtypes():
    single = Problem(1, 2, 2, 64, 64, (256,), (256,), dtype=torch.float32)
    assert any("not those of float32" in w for w in explain(Variant(), problem=single).warnings)
    assert explain(Variant(), problem=problem(256, 256)).warnings == ()


def test_costs_for_every_target():
    causal = Variant(mask=mask.causal())
    found = {
        t: explain(causal, problem=problem(8192, 8192, heads=16, d=128), target=t)
        for t in ("sm100", "sm103", "sm90", "cpu")
    }
    assert found["sm90"].best.seconds > 1.8 * found["sm100"].best.seconds
    assert found["sm103"].best.seconds <= found["sm100"].best.seconds
    assert found["cpu"].forward == found["cpu"].roofline == ()
    assert "modelled" not in str(found["cpu"])
    assert "modelled" in str(found["sm100"])


def test_softcap_makes_the_exponentials_bind():
    capped = explain(Variant(score=softcap), problem=problem(1024, 1024, d=128))
    plain = explain(Variant(), problem=problem(1024, 1024, d=128))
    assert [t.bound for _, _, t in plain.roofline[:2]] == ["mma", "mma"]
    assert capped.roofline[0][2].bound == "exp"
    assert capped.best.seconds > plain.best.seconds


def test_the_variants_own_schedule_is_kept_and_judged():
    slow = Schedule("heads", "persistent", "longest_first")
    causal = Variant(mask=mask.causal(), schedule=slow)
    found = explain(causal, problem=problem(8192, 8192, heads=16, d=128))
    assert found.plan.schedule == found.best.schedule == slow
    assert any("slower than" in w for w in found.warnings)


def test_packing_needs_a_group():
    packed = Variant(schedule=Schedule("packed_gqa"))
    found = explain(packed, problem=problem(256, 256))
    assert found.best is None
    assert any("none to pack" in w for w in found.warnings)
    shared = explain(packed, problem=problem(256, 256, kv=1))
    assert shared.best.schedule.coordinates == "packed_gqa"


def test_a_number_of_splits_of_ones_own():
    thirds = Variant(schedule=Schedule("split_kv", num_splits=3))
    found = explain(thirds, problem=problem(1, 4096))
    assert found.best.schedule.num_splits == 3
    assert found.best.tiles == 6


# ------------------------------------------------------------------------------ compile key


def build(width, table, sizes=(512, 512), **policies):
    mod = score.define(lambda s, b, h, q_idx, kv_idx: s * table[h])
    return plan(Variant(mask=mask.sliding_window(width), score=mod, **policies), problem(*sizes))


def test_new_closures_widths_tensors_and_lengths_have_one_key():
    assert build(10, torch.rand(2)).digest == build(99, torch.rand(2), (300, 4000)).digest


def test_a_single_query_tile_is_another_kernel():
    assert build(10, torch.rand(2)).digest != build(10, torch.rand(2), (1, 512)).digest


def test_what_is_compiled_in_changes_the_key():
    keys = [
        build(10, torch.rand(2)),
        build(10, torch.rand(2).double()),
        build(10, torch.rand(2), exp=exp.polynomial(4)),
        build(10, torch.rand(2), rescale_threshold=0.0),
        build(10, torch.rand(2), schedule=Schedule()),
        plan(Variant(), problem(512, 512)),
        plan(Variant(), problem(512, 512), "sm90"),
        plan(Variant(), problem(512, 512, d=128)),
    ]
    assert len({k.digest for k in keys}) == len(keys)


# ------------------------------------------------------------------------- text and inputs


def test_the_text_has_everything():
    slopes = torch.rand(2, requires_grad=True)
    mod = named("slope", lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx - kv_idx).abs())
    variant = Variant(
        mask=mask.causal() & mask.sliding_window(100), score=mod >> softcap, sink=sink.constant(1.0)
    )
    found = variant.explain(*tensors(q=300, k=200, kv=1))
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "causal & sliding_window(100, 0)",
        "slope >> softcap",
        "tanh(",
        "sink",
        "reference: the tensors are on the CPU",
        "2 query heads on 1 KV heads",
        "EMPTY",
        "PARTIAL",
        "FULL",
        "MMA",
        "packed_gqa",
        "longest first",
        "int64 scalar, now 100",
        "float32 (2,), receives a gradient",
        found.plan.digest,
        "rows have nothing to attend to",
        "softcap levels out what slope does",
    ):
        assert part in text


def test_varlen_and_paged_layouts():
    cu = torch.tensor([0, 100, 100, 356], dtype=torch.int32)
    q = torch.zeros(356, 2, 64, dtype=torch.bfloat16)
    found = explain(Variant(mask=mask.causal()), q, q, q, layout=sequence.varlen(cu))
    assert found.problem.seqlens_q == (100, 0, 256)
    assert found.empty_rows.at_most == 0
    assert "packed queries, packed keys" in str(found)
    assert "batch sorted" in str(found)
    pages = torch.zeros(8, 64, 2, 64, dtype=torch.bfloat16)
    paged = sequence.paged(
        torch.arange(8, dtype=torch.int32).reshape(2, 4),
        torch.tensor([200, 256], dtype=torch.int32),
    )
    found = explain(Variant(), torch.zeros(2, 1, 2, 64).bfloat16(), pages, pages, layout=paged)
    assert "pages of 64 keys" in str(found)


def test_wrong_calls():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="either q, k and v, or problem"):
        explain(Variant())
    with pytest.raises(TypeError, match="either q, k and v, or problem"):
        explain(Variant(), q, k, v, problem=problem(1, 1))
    with pytest.raises(TypeError, match="without k and v"):
        explain(Variant(), q)
    with pytest.raises(TypeError, match="a layout goes with"):
        explain(Variant(), problem=problem(1, 1), layout=sequence.fixed())
    with pytest.raises(ValueError, match="'sm70'; accepted are"):
        explain(Variant(), q, k, v, target="sm70")
    with pytest.raises(ValueError, match="backend='cuda'"):
        explain(Variant(), q, k, v, backend="cuda")
    with pytest.raises(ValueError, match="head dim"):
        explain(Variant(), q, k[..., :32], v)


def test_a_backend_that_is_not_there_is_said_so():
    found = explain(Variant(), *tensors(), backend="sm100")
    assert not found.chosen.ok
    assert any("would fail" in w for w in found.warnings)


def test_a_million_tokens_take_no_quadratic_memory():
    long = Variant(mask=mask.causal() & mask.sliding_window(4096))
    found = explain(long, problem=problem(1 << 20, 1 << 20))
    assert sum(found.tiles.values()) == 2 * 8192**2
    assert found.empty_rows.at_most == 0  # the diagonal's window holds full tiles
    assert math.isclose(found.skipped, 1 - 4097 / 2**20, abs_tol=1e-3)


def test_a_quicker_schedule_that_is_not_chosen_has_its_reason():
    sizes = problem(256, 8192, heads=8, d=128)
    text = " ".join(
        str(explain(Variant(mask=mask.causal()), problem=sizes, target="sm100")).split()
    )
    assert "quicker" in text and "keys are split while each share has 8 blocks" in text
    asked = Variant(mask=mask.causal(), schedule=Schedule())
    assert "not chosen" not in str(explain(asked, problem=sizes, target="sm100"))
