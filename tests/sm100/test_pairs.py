"""Pairs of CTAs that share a work tile (cta_group::2): the protocol, and results of the kernel."""

from __future__ import annotations

import itertools

import attrs
import pytest
from sampled import one_of
from seeded import bugs

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import FIXED, execute

from fa4core.pipeline.check import ProtocolError
from fa4core.pipeline.declare import Pipeline
from fa4core.plan.target import SM100
from fa4core.sm100.forward.protocol import QUEUE_ROLES, ROLES, check_forward
from fa4core.sm100.forward.spec import Spec
from fa4core.spec import MAX_HEAD_DIM
from fa4core.testing import LayoutSpec, Shape

PAIR = "schedule=schedule.Schedule(ctas=2, l2_sections=False)"
AT_LEADER = {"q_full", "kv_full", "p_ready", "p_last"}
SEQUSED, VARLEN = LayoutSpec("seqused", slack=3), LayoutSpec("varlen")
LISTS = ((3, 0, 2), (1, 1, 4), (2, 5, 1))
SPEC = Spec("", "bfloat16", 128, 128, ctas=2)
SEEDED = [
    bug
    for role, (function, _) in ROLES.items()
    for bug in bugs(role, function)
    if "`kv_free.arrive(stage=k)`" not in str(bug)  # of short rings: no pair has one, see below
]
OF_SCHEDULER = list(bugs("scheduler", QUEUE_ROLES["scheduler"][0]))


# ---------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tiles", [1, 2])
def test_every_short_list_of_tiles_is_safe(tiles: int, dynamic: bool) -> None:
    """Lists of three work tiles with up to three key blocks; `test_all_protocols` has the rest."""
    spec = attrs.evolve(SPEC, tiles=tiles, dynamic=dynamic)
    for blocks in itertools.product(range(4), repeat=3):
        check_forward(spec, blocks)


def test_every_pair_of_head_dims_has_a_pipeline_that_fits() -> None:
    dims = range(8, MAX_HEAD_DIM + 1, 8)
    for d, d_v in itertools.product(dims, dims):
        chosen = Spec("", "bfloat16", d, d_v, tiles=SM100.forward_tile(d, d_v).stages, ctas=2)
        assert chosen.smem_bytes <= SM100.smem_per_cta
        assert chosen.tmem_columns <= 512
        assert chosen.holds_k


def test_arrivals_of_the_peer_are_counted_where_they_go() -> None:
    alone, pair = Spec("", "bfloat16", 128, 128).pipeline, SPEC.pipeline
    for one, both in zip(alone.signals, pair.signals, strict=True):
        factor = 2 if one.name in AT_LEADER else 1
        assert pair.count(both) == factor * alone.count(one), one.name


@pytest.mark.parametrize("bug", SEEDED, ids=str)
def test_a_seeded_bug_is_found(bug) -> None:
    with pytest.raises(ProtocolError) as found:
        for blocks in LISTS:
            check_forward(SPEC, blocks, {bug.role: bug.function})
    assert any(role in str(found.value) for role in ROLES)


@pytest.mark.parametrize("bug", OF_SCHEDULER, ids=str)
def test_a_seeded_bug_of_the_scheduler_is_found(bug) -> None:
    with pytest.raises(ProtocolError, match=r"scheduler|tile_"):
        for blocks in LISTS:
            check_forward(attrs.evolve(SPEC, dynamic=True), blocks, {"scheduler": bug.function})


def _reach(self: Pipeline, signal, role: str, *, wrong: str, instead: str):
    right = Pipeline.reach(self, signal, role)
    return instead if right == wrong else right


@attrs.frozen
class NotMulticast(Pipeline):
    """Commits reach the leader's CTA only."""

    def reach(self, signal, role):
        return _reach(self, signal, role, wrong="all", instead="leader")


@attrs.frozen
class NotRemote(Pipeline):
    """Arrivals meant for the leader stay in their CTA, which the counts expect."""

    def reach(self, signal, role):
        return _reach(self, signal, role, wrong="leader", instead="own")


@attrs.frozen
class PeerUncounted(Pipeline):
    """The leader's barriers count the arrivals of one CTA."""

    def count(self, signal):
        counted = Pipeline.count(self, signal)
        return counted // 2 if signal.name in AT_LEADER else counted


@attrs.frozen
class PeerCountedTwice(Pipeline):
    """The peer's own barriers count two commits."""

    def count(self, signal):
        counted = Pipeline.count(self, signal)
        return counted if signal.name in AT_LEADER else 2 * counted


@pytest.mark.parametrize("kind", [NotMulticast, NotRemote, PeerUncounted, PeerCountedTwice])
def test_a_wrong_exchange_between_the_ctas_is_found(kind: type[Pipeline]) -> None:
    right = SPEC.pipeline
    fields = {f.name: getattr(right, f.name) for f in attrs.fields(Pipeline)}
    spec = attrs.evolve(SPEC)
    spec.__dict__["pipeline"] = kind(**fields)
    with pytest.raises(ProtocolError):
        for blocks in LISTS:
            check_forward(spec, blocks)
    check_forward(SPEC, LISTS[0])


# ----------------------------------------------------------------------------------- results

RAGGED = Shape((600, 0, 5, 140), (257, 40, 0, 128), 2, 1, 64, 64)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", [SEQUSED, VARLEN], ids=["padded", "packed"])
def test_layouts(layout, seed: int) -> None:
    """One pair that works through all tiles; then a pair for each."""
    execute(f"Variant({PAIR})", RAGGED, layout, seed=seed, num_sms=(1, 148)[seed])


def test_one_query_tile_in_each_cta() -> None:
    """At most 256 queries; at most 128 leave the peer without any."""
    for length in (200, 100, 1):
        execute(f"Variant({PAIR})", Shape((length,), (300,), 4, 2, 64, 64), num_sms=3)
    execute(f"Variant({PAIR})", Shape((5,), (0,), 1, 1, 64, 64))


@pytest.mark.parametrize(
    "d, d_v", one_of(3, [(128, 128), (192, 128), (40, 8), (256, 256), (136, 200)])
)
def test_head_dims(d: int, d_v: int) -> None:
    shape = Shape((700,), (650,), 1, 1, d, d_v)
    execute(f"Variant(mask=mask.causal(), {PAIR})", shape, contents="large", num_sms=2)


@pytest.mark.parametrize(
    "layout, d, d_v",
    one_of(4, [(at, *dims) for at in (VARLEN, FIXED) for dims in ((192, 128), (64, 64))]),
)
def test_masks_compose_with_mods_and_sinks(layout, d: int, d_v: int) -> None:
    lengths = ((530,), (500,)) if layout is FIXED else ((530, 0, 70), (500, 100, 1))
    shape = Shape(*lengths, 2, 1, d, d_v)
    variant = (
        "Variant(mask=mask.sliding_window(100, 20) & ~mask.document(integers("
        f"0, {shape.batch}, 530, high=3)) | mask.sink_tokens(4), "
        f"score=score.alibi(normal(1, 2, std=0.2)), sink=sink.learned(normal(2, 2)), {PAIR})"
    )
    execute(variant, shape, layout, num_sms=4)


@pytest.mark.parametrize(
    "choice",
    one_of(
        2,
        [
            "source='dynamic', order='batch_sorted'",
            "source='dynamic'",
            "source='one_tile', coordinates='split_kv', num_splits=2",
        ],
    ),
)
def test_schedules(choice: str) -> None:
    """The queue hands tiles to pairs, sorted or not, and shares of the keys, too."""
    chosen = PAIR.replace("ctas=2", f"ctas=2, {choice}")
    execute(f"Variant({chosen})", RAGGED, VARLEN, num_sms=4)


def test_packed_heads() -> None:
    packed = PAIR.replace("ctas=2", "ctas=2, coordinates='packed_gqa'")
    execute(f"Variant(mask=mask.causal(), {packed})", Shape((150,), (300,), 6, 2, 64, 64))


@pytest.mark.parametrize("page_size", one_of(2, [48, 256]))
def test_pages(page_size: int) -> None:
    layout = LayoutSpec("paged", page_size=page_size)
    shape = Shape((600, 5), (300, 128), 2, 1, 64, 64)
    execute(f"Variant(mask=mask.causal(), {PAIR})", shape, layout)
