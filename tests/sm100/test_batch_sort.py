"""The pre-pass that sorts sequences by their longest work tile, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant, attention
from fa4core.dispatch import kernels_of, plan_call
from fa4core.emulator.session import emulator
from fa4core.forward import metadata
from fa4core.forward.tables import tables
from fa4core.places import in_emulator
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import tile_map
from fa4core.prepared import prepare
from fa4core.sm100.forward.launch import FORWARD, metadata_of, spec_of
from primitives import mask
from primitives.schedule import Schedule
from primitives.sequence import varlen

LENGTHS = st.lists(st.sampled_from([0, 1, 130, 300, 300, 700, 1500]), min_size=1, max_size=40)


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.booleans(), st.integers(1, 2), st.sampled_from([2, 512]), st.integers(0, 99))
def test_the_pre_pass_makes_what_numpy_makes(lengths, causal, side, tiles_of_a_warp, seed) -> None:
    """Ties, empty sequences, and several warps for a sequence among them."""
    batch = len(lengths)
    problem = Problem(batch, 4, 2, 64, 64, tuple(lengths), tuple(reversed(lengths)))
    chosen = mask.causal() if causal else mask.full()
    tiles = tile_map(chosen.expr, batch=batch, heads=4, seqlens_q=lengths, seqlens_k=lengths[::-1])
    schedule = Schedule(order="batch_sorted")
    expected, runs = tables(problem, tiles, side, schedule)
    with pytest.MonkeyPatch.context() as patch, emulator(seed=seed, record=False):
        patch.setattr(metadata, "TILES_OF_A_WARP", tiles_of_a_warp)
        found = metadata.metadata(problem, tiles, side, schedule, in_emulator("sm100"), "cpu")
    assert torch.equal(found.items, expected)
    assert torch.equal(found.runs, runs)
    assert sorted(found.batch_map.tolist()) == list(range(batch))
    places = [b for b in found.batch_map.tolist() if b in set(expected[:, 0].tolist())]
    _, first = np.unique(expected[:, 0].numpy(), return_index=True)
    assert places == expected[:, 0][torch.from_numpy(np.sort(first))].tolist()


def test_kept_metadata_is_not_made_again() -> None:
    """Two kernels of the pre-pass and the forward; with metadata of another call the forward alone,
    also where the scale and what the tensors hold are new."""
    lengths = torch.tensor([0, 40, 300, 301], dtype=torch.int32)
    variant = Variant(mask=mask.causal(), schedule=Schedule(order="batch_sorted"))
    layout = varlen(lengths)
    results, plan = [], None
    with emulator(num_sms=2, record=False) as session:
        for seed, scale, launches in ((0, 0.1, 3), (1, 0.2, 1)):
            torch.manual_seed(seed)
            q, k, v = (torch.randn(301, 1, 64, dtype=torch.bfloat16) for _ in range(3))
            call, _ = plan_call(q, k, v, [], layout, variant.spec, scale, "emulator")
            before, place = len(session.launches), in_emulator("sm100")
            if plan is None:
                plan = metadata_of(call, spec_of(call, "sm100"), place, q.device)
            out, _, _ = prepare(FORWARD, call, q, k, v, place, plan)(q, k, v)
            assert len(session.launches) - before == launches
            results.append((q, k, v, scale, out))
    assert plan is not None
    assert plan.batch_map.tolist() == [1, 0, 2]
    for q, k, v, scale, out in results:
        expected = attention(q, k, v, variant, layout=layout, scale=scale, backend="reference")
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_the_pre_pass_is_among_the_kernels_to_compile_ahead_of_time() -> None:
    variant = Variant(mask=mask.causal(), schedule=Schedule(order="batch_sorted"))
    problem = Problem(2, 1, 1, 64, 64, (300, 40), (300, 40))
    needed = kernels_of(variant, [problem], "sm100", 0.1, True)
    assert [k.function.rpartition(":")[2] for k in needed] == ["sort_batch", "forward"]
    assert needed[0] == metadata.pre_pass(in_emulator("sm100"))
