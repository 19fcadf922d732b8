"""Sinks, exp policies, schedules, layouts and block maps: values with validation."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from evaluation import evaluate, grid, table

from primitives import exp, mask, parameter, schedule, score, sequence, sink, sparsity


def test_sinks():
    logits = torch.tensor([0.5, -1.0, 2.0])
    values = grid(2, 2, 1, 3)
    learned = sink.learned(logits)
    assert evaluate(learned.expr, values).flatten().tolist() == logits.tolist()
    assert evaluate(sink.constant(1.5).expr, values) == 1.5
    assert sink.constant(0.0).key == sink.constant(2.0).key != learned.key
    by_query = sink.define(lambda b, h, q_idx: -0.1 * q_idx)
    assert evaluate(by_query.expr, values).flatten().tolist() == pytest.approx([0.0, -0.1])
    leaf = logits.clone().requires_grad_()
    (row,) = sink.learned(leaf).gradient().captured
    assert row[0].tensor is leaf and row[2].attr == 1.0
    assert sink.learned(logits).gradient().captured == ()


def test_exp_policies():
    assert exp.hardware().fraction == 0.0
    assert exp.polynomial(5) == exp.Exp(5, 1.0)
    assert exp.mixed(3, 0.25) == exp.Exp(3, 0.25) != exp.mixed(4, 0.25)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        exp.hardware().degree = 4  # type: ignore[misc]


def test_schedules():
    assert schedule.split_kv(4).num_splits == 4
    assert schedule.Schedule(order="batch_sorted").source == "persistent"
    assert len({schedule.Schedule(), schedule.Schedule(), schedule.split_kv(2)}) == 2


def test_layouts():
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = sequence.varlen(offsets)
    assert packed.cu_seqlens_k is offsets and set(packed.tensors) == {
        "cu_seqlens_q",
        "cu_seqlens_k",
    }
    paged = sequence.paged(torch.zeros(2, 3, dtype=torch.int32), torch.tensor([4, 9]))
    assert set(paged.tensors) == {"page_table", "seqused_k"}
    assert sequence.fixed().tensors == {}


BLOCKS = torch.tensor([[True, False, True], [False, True, False]])


def expand(blocks, block_q, block_k):
    return blocks.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (1, 3)])
def test_block_matrix_of_any_rank(lead):
    blocks = torch.rand(*lead, 2, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    given = sparsity.from_blocks(blocks, 4, 2).apply(mask.full())
    expected = expand(blocks.expand(*(2, 3)[: 2 - len(lead)], *blocks.shape), 4, 2)
    assert torch.equal(table(given.expr, 8, 6, 2, 3), expected.broadcast_to(2, 3, 8, 6))


def test_full_blocks_ignore_the_mask_and_partial_ones_follow_it():
    both = sparsity.BlockMap(BLOCKS[None, None], ~BLOCKS[None, None], 2, 3)
    causal = mask.causal("top_left")
    given = table(both.apply(causal).expr, 4, 9)
    full = expand(BLOCKS, 2, 3)
    assert torch.equal(given[0, 0], full | table(causal.expr, 4, 9)[0, 0])
    assert torch.equal(
        table(sparsity.from_blocks(BLOCKS, 2, 3).apply(causal).expr, 4, 9)[0, 0],
        full & table(causal.expr, 4, 9)[0, 0],
    )
    only_full = sparsity.BlockMap(BLOCKS[None, None], None, 2, 3)
    assert torch.equal(table(only_full.apply(causal).expr, 4, 9)[0, 0], full)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_top_k(lead):
    scores = torch.rand(*lead, 4, 5, generator=torch.Generator().manual_seed(1))
    indices = scores.topk(2).indices
    indices = torch.cat([indices, indices[..., :1], torch.full_like(indices[..., :1], -1)], -1)
    given = sparsity.from_topk(indices, 5, 2, 3).apply(mask.full())
    chosen = scores >= scores.topk(2).values[..., -1:]
    expected = expand(chosen, 2, 3).broadcast_to(2, 3, 8, 15)
    assert torch.equal(table(given.expr, 8, 15, 2, 3), expected)


def test_new_block_maps_keep_the_key():
    first, second = (sparsity.from_blocks(torch.ones(n, n + 1).bool()) for n in (2, 5))
    assert first.apply(mask.causal()).key == second.apply(mask.causal()).key


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(3, torch.int64), (True, torch.bool), (0.5, torch.float32)],
)
def test_parameter(value, dtype):
    wrapped = parameter(value)
    assert wrapped.dtype == dtype and wrapped.dim() == 0 and wrapped.item() == value
    assert parameter(wrapped) is wrapped
    with torch.device("meta"):
        assert parameter(value).device.type == "cpu"


def test_parameter_takes_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    assert parameter(numpy.int32(4)).item() == 4
    assert mask.sliding_window(numpy.int64(3)) == mask.sliding_window(3)


FLOATS, INTS = torch.rand(2), torch.zeros(2, 2, dtype=torch.int32)
REFUSED = {
    "degree": (lambda: exp.polynomial(7), "degree=7; an int from 0 to 6"),
    "degree float": (lambda: exp.polynomial(3.0), "degree=3.0"),
    "degree bool": (lambda: exp.polynomial(True), "degree=True"),
    "fraction": (lambda: exp.mixed(3, 1.5), "fraction=1.5; a share between 0 and 1"),
    "fraction nan": (lambda: exp.mixed(3, math.nan), "fraction=nan"),
    "fraction text": (lambda: exp.mixed(3, "0.5"), "fraction='0.5'"),
    "one split": (lambda: schedule.split_kv(1), "num_splits=1"),
    "splits of heads": (lambda: schedule.Schedule(num_splits=2), "coordinates='heads'"),
    "splits float": (lambda: schedule.split_kv(2.0), "num_splits=2.0; an int"),
    "coordinates": (lambda: schedule.Schedule(coordinates="rows"), "rows.*packed_gqa"),
    "source": (lambda: schedule.Schedule(source="queue"), "one_tile"),
    "order": (lambda: schedule.Schedule(order="lpt"), "longest_first"),
    "three ctas": (lambda: schedule.Schedule(ctas=3), "ctas=3; accepted are 1, 2"),
    "ctas float": (lambda: schedule.Schedule(ctas=2.0), "ctas=2.0; accepted are 1, 2"),
    "offsets float": (lambda: sequence.varlen(FLOATS), "float32.*int32 or int64"),
    "offsets list": (lambda: sequence.varlen([0, 3]), "list.*int32 or int64"),
    "offsets rank": (lambda: sequence.varlen(INTS), r"shape \(2, 2\); 1 dim"),
    "pages alone": (lambda: sequence.Layout(page_table=INTS), "needs seqused_k"),
    "pages and packed": (
        lambda: sequence.Layout(page_table=INTS, seqused_k=INTS[0], cu_seqlens_k=INTS[0]),
        "packed.*or paged",
    ),
    "no blocks": (lambda: sparsity.BlockMap(None, None), "got neither"),
    "block size": (lambda: sparsity.from_blocks(BLOCKS, 0), "block_q=0; a positive int"),
    "block size bool": (lambda: sparsity.from_blocks(BLOCKS, 64, True), "block_k=True"),
    "blocks float": (lambda: sparsity.from_blocks(torch.rand(2, 2)), "float32.*a bool tensor"),
    "blocks list": (lambda: sparsity.BlockMap([[True]], None), "full is list"),
    "blocks rank": (lambda: sparsity.from_blocks(torch.ones(3).bool()), "blocks_q, blocks_k"),
    "blocks differ": (
        lambda: sparsity.BlockMap(BLOCKS[None, None], BLOCKS.T[None, None]),
        "full has 2 x 3 blocks and partial 3 x 2",
    ),
    "top-k float": (lambda: sparsity.from_topk(torch.rand(2, 2), 4), "integer tensor"),
    "top-k list": (lambda: sparsity.from_topk([[0]], 4), "list"),
    "top-k outside": (lambda: sparsity.from_topk(INTS + 4, 4), "key block 4; blocks 0..3 exist"),
    "top-k rank": (lambda: sparsity.from_topk(INTS[0], 4), r"\(blocks_q, k\)"),
    "top-k none": (lambda: sparsity.from_topk(INTS - 1, 0), "num_blocks_k=0"),
    "sink int": (lambda: sink.learned(INTS[0]), "int32.*floating-point"),
    "sink rank": (lambda: sink.learned(torch.rand(2, 2)), r"\(heads_q,\) is accepted"),
    "parameter text": (lambda: parameter("3"), "bool, int, float or 0-d tensor"),
    "parameter too large": (lambda: parameter(2**63), "does not fit into 64 bits"),
    "cap too large": (lambda: score.softcap(10**400), "cap=an int of 1329 bits; at most"),
    "logit too large": (lambda: sink.constant(10**400), "logit=an int of 1329 bits"),
    "parameter vector": (lambda: parameter(FLOATS), r"shape \(2,\)"),
    "score as mask": (lambda: mask.causal() & score.identity(), "two masks; got ScoreMod"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    build, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        build()
