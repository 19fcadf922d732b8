"""Targets: the numbers of the hardware that plans, rooflines and cost estimates are made from.

The one home of hardware numbers; it imports neither torch nor CUTLASS. `plan`, `roofline`,
`makespan` and `explain` use it, and `fa4core.compile.targets` takes names and sizes from it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from fa4core.plan import costs
from fa4core.plan.costs import ANY_HEAD_DIM, Cost, up_to
from primitives.exp import Exp


@attrs.frozen
class Rates:
    """What one GPU does in a clock or a second; the numbers of a roofline.

    Attributes:
        sms: Streaming multiprocessors.
        clock_ghz: Clock under load, GHz.
        mma: bf16 tensor-core FLOP per SM and clock, dense.
        mufu: Operations of the multi-function unit (exp2, tanh, ...) per SM and clock.
        fma: FP32 multiply-adds per SM and clock.
        alu: Integer, comparison, minimum and conversion operations per SM and clock.
        issue: Instructions of a warp that an SM's schedulers issue in a clock.
        smem_bytes: Bytes per SM and clock read from shared memory (loads through L1 share them).
        l2_bytes: Size of the L2 cache, bytes.
        hbm_tbps: Bandwidth of global memory, TB/s.
        peak_tflops: bf16 dense, as the vendor states it, TFLOP/s.
        mma_rows: Rows of one MMA instruction: how often the B operand is read again.
        mma_columns: Columns of one MMA instruction: how often an A operand in SMEM is.
    """

    sms: int
    clock_ghz: float
    mma: int
    mufu: int
    fma: int
    alu: int
    issue: int
    smem_bytes: int
    l2_bytes: int
    hbm_tbps: float
    peak_tflops: float
    mma_rows: int
    mma_columns: int


@attrs.frozen
class TileShape:
    """Sizes of the tiles of a pass.

    Attributes:
        q: Queries in a tile.
        k: Keys in a tile.
        stages: Query tiles that one CTA of the forward pass works on side by side.
        ctas: CTAs that share an MMA, each with a key tile of its own in the backward pass.
    """

    q: int
    k: int
    stages: int = 1
    ctas: int = 1

    def __str__(self) -> str:
        stages = f"{self.stages} x " if self.stages > 1 else ""
        return f"{stages}{self.q} x {self.k}{', 2-CTA' if self.ctas > 1 else ''}"


@attrs.frozen
class Target:
    """What kernels are planned for.

    Attributes:
        name: `"sm100"`, `"sm103"`, `"sm90"` or `"cpu"`.
        arch: The compiler's name of it; empty for the CPU.
        title: A name for people.
        smem_per_cta: Shared memory that one CTA can have, bytes.
        emulated_exp: Share of the forward exponentials on FMA units unless the variant says, by
            head dim: (greatest head dim, share), ascending.
        rescale_threshold: Default of the variant's, in the log2 domain.
        rates: None where there is no roofline (the CPU).
        forward_cost: Of the forward pass, by head dim: (greatest head dim, cost), ascending.
        backward_cost: Of the backward pass, by CTAs that share an MMA (1 or 2).
        forward_tile: `(head_dim, head_dim_v) -> TileShape`.
        backward_tile: Likewise.
        work_queue: Whether running CTAs can take over those that have not started (cluster launch
            control).
        deals: Whether the forward's static lists are dealt by time (`fa4core.forward.lists`).
    """

    name: str
    arch: str
    title: str
    smem_per_cta: int
    emulated_exp: tuple[tuple[int, float], ...]
    rescale_threshold: float
    rates: Rates | None
    forward_cost: tuple[tuple[int, Cost], ...]
    backward_cost: dict[int, Cost] = attrs.field(factory=dict, hash=False)
    forward_tile: Callable[[int, int], TileShape] = attrs.field(default=None, repr=False)
    backward_tile: Callable[[int, int], TileShape] = attrs.field(default=None, repr=False)
    work_queue: bool = False
    deals: bool = False

    def exp(self, head_dim: int, busy: bool = False) -> Exp:
        """How a forward pass computes exponentials unless the variant says.

        Args:
            head_dim: The greater one of queries' and values'.
            busy: Whether a score mod needs the multi-function unit for every score, too.
        """
        share = up_to(head_dim, self.emulated_exp)
        return Exp(fraction=max(share, BUSY_EXP) if busy and share else share)

    def cost(self, head_dim: int) -> Cost:
        """Of the forward pass.

        Args:
            head_dim: The greater one of queries' and values'.
        """
        return up_to(head_dim, self.forward_cost)

    @property
    def measured(self) -> Rates:
        """The rates, for callers that need a roofline.

        Raises:
            ValueError: The target has none.
        """
        if self.rates is None:
            raise ValueError(
                f"target {self.name!r} has no roofline; choose one of sm100, sm103 and sm90"
            )
        return self.rates


def _sm100_forward(head_dim: int, head_dim_v: int) -> TileShape:
    # Two query tiles need 2 (128 + d_v) of the 512 TMEM columns, for scores and accumulators, and
    # in shared memory, 2 bytes an element, room beside them for a tile of K and one of V.
    columns = 2 * (128 + head_dim_v)
    tile_bytes = 2 * 128 * head_dim + 2 * 128 * max(head_dim, head_dim_v)
    return TileShape(128, 128, 2 if columns <= 512 and 2 * tile_bytes <= 192 * 1024 else 1)


def _sm100_backward(head_dim: int, head_dim_v: int) -> TileShape:
    # Beyond 128, dK and dV of a tile leave room in tensor memory for scores of 64 queries.
    if max(head_dim, head_dim_v) > 128:
        return TileShape(64, 128)
    return TileShape(128, 128)


def _sm90_forward(head_dim: int, head_dim_v: int) -> TileShape:
    # FlashAttention-3's tiles: the accumulators of a tile fill the registers of its warpgroups.
    for limit, shape in (
        (64, TileShape(192, 128)),
        (96, TileShape(192, 128)),
        (128, TileShape(128, 128)),
        (192, TileShape(128, 112)),
    ):
        if max(head_dim, head_dim_v) <= limit:
            return shape
    return TileShape(128, 80)


def _sm90_backward(head_dim: int, head_dim_v: int) -> TileShape:
    for limit, shape in (
        (64, TileShape(128, 128)),
        (128, TileShape(64, 128)),
        (192, TileShape(64, 96)),
    ):
        if max(head_dim, head_dim_v) <= limit:
            return shape
    return TileShape(64, 48)


def _cpu_tile(head_dim: int, head_dim_v: int) -> TileShape:
    return TileShape(128, 128)


# Rates per SM and clock: FlashAttention-4, section 3 (arXiv 2603.05451). Peak, SMs, clock and
# memory: the vendor's data sheets (HGX B200, HGX B300, H200). ALU: the throughput table of the
# CUDA programming guide (64 comparisons, minima or conversions per SM and clock); its four
# schedulers issue one instruction each.
_B200 = Rates(
    sms=148,
    clock_ghz=1.85,
    mma=8192,
    mufu=16,
    fma=128,
    alu=64,
    issue=4,
    smem_bytes=128,
    l2_bytes=126 << 20,
    hbm_tbps=7.7,
    peak_tflops=2250,
    mma_rows=128,
    mma_columns=128,
)
_B300 = attrs.evolve(_B200, mufu=32, hbm_tbps=8.0)
_H200 = Rates(
    sms=132,
    clock_ghz=1.83,
    mma=4096,
    mufu=16,
    fma=128,
    alu=64,
    issue=4,
    smem_bytes=128,
    l2_bytes=50 << 20,
    hbm_tbps=4.8,
    peak_tflops=989,
    mma_rows=64,  # a warpgroup's wgmma has 64 rows, so B is read again for every 64
    mma_columns=256,
)

NO_EMULATED_EXP = ((ANY_HEAD_DIM, 0.0),)
# By share, modelled cycles of a key block of our causal forward (`python -m fa4core time`):
#   head dim  64: 2,321 at 12.5 %, 2,130 at 25 %, 2,065 at 31.25 %
#   head dim 128: 2,376 at 12.5 %, 2,372 at 18.75 %
# More is left out: real GPUs lost 20 % with much emulation in code twice as long.
# Causal with a softcap, head dim 128, whose tanh is on the multi-function unit, too: 5,123 cycles
# at 12.5 % of both, 4,332 at half of the exponentials and none of the tanh.
BUSY_EXP = 0.5
EMULATED_EXP = ((64, 0.25), (ANY_HEAD_DIM, 0.125))

SM100 = Target(
    name="sm100",
    arch="sm_100a",
    title="NVIDIA B200",
    smem_per_cta=232_448,
    emulated_exp=EMULATED_EXP,
    rescale_threshold=8.0,  # log2(256): FlashAttention-4, section 3.1
    rates=_B200,
    forward_cost=costs.B200_FORWARD,
    backward_cost=costs.BLACKWELL_BACKWARD,
    forward_tile=_sm100_forward,
    backward_tile=_sm100_backward,
    work_queue=True,
)
SM103 = attrs.evolve(
    SM100,
    name="sm103",
    arch="sm_103a",
    title="NVIDIA B300",
    emulated_exp=NO_EMULATED_EXP,  # twice the exp2 rate: the MUFU unit no longer binds
    rates=_B300,
    forward_cost=costs.B300_FORWARD,
)
SM90 = Target(
    name="sm90",
    arch="sm_90a",
    title="NVIDIA H200",
    smem_per_cta=232_448,
    emulated_exp=NO_EMULATED_EXP,
    rescale_threshold=8.0,
    rates=_H200,
    forward_cost=costs.HOPPER_FORWARD,
    backward_cost=costs.HOPPER_BACKWARD,
    forward_tile=_sm90_forward,
    backward_tile=_sm90_backward,
    deals=True,
)
CPU = Target(
    name="cpu",
    arch="",
    title="the reference on a CPU",
    smem_per_cta=0,
    emulated_exp=NO_EMULATED_EXP,
    rescale_threshold=8.0,
    rates=None,
    forward_cost=(),
    forward_tile=_cpu_tile,
    backward_tile=_cpu_tile,
)

TARGETS: dict[str, Target] = {t.name: t for t in (SM100, SM103, SM90, CPU)}


def target(name: str | Target) -> Target:
    """The target of a name.

    Raises:
        ValueError: There is no such target.
    """
    if isinstance(name, Target):
        return name
    if name not in TARGETS:
        raise ValueError(f"target {name!r}; accepted are {', '.join(TARGETS)}")
    return TARGETS[name]


def of_capability(major: int, minor: int) -> Target | None:
    """The target of a CUDA device's compute capability, or None."""
    return {(9, 0): SM90, (10, 0): SM100, (10, 3): SM103}.get((major, minor))
