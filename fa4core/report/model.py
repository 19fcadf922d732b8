"""Modelled cycles of an SM for one key block, by unit, from the counts in machine code.

A unit's cycles are what its instructions take at the target's rates (`fa4core.plan.target`), all
warps of a role together; nothing overlaps badly and nobody waits. So the largest is a lower bound,
as the paper's roofline is, and what lies between the two are instructions that the paper does not
count. Scalar FP32 instructions fill the FMA lanes for a cycle, packed ones for two.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fa4core.pipeline.declare import WARP
from fa4core.plan.plan import Plan
from fa4core.plan.target import Rates
from fa4core.plan.tiles import FULL, PARTIAL
from fa4core.report.figures import TILE, Figures, Shape

WARPS = TILE // WARP  # of a role that has a thread for each row
UNITS = ("tensor", "MUFU", "FMA", "ALU", "SMEM", "issue")
MMA_STEP = 16  # of the contracted dimension


@attrs.frozen
class Cycles:
    """Cycles of an SM for one key block of a CTA, by unit.

    Attributes:
        kind: "unmasked" or "masked".
        units: In the order of `UNITS`; None where the source says nothing.
    """

    kind: str
    units: dict[str, float | None]

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        return max(self.units, key=lambda unit: self.units[unit] or 0.0)


def paper(plan: Plan, kind: str) -> Cycles:
    """The roofline of FlashAttention-4's section 3, with the variant's own work."""
    terms = plan.roofline(FULL if kind == "unmasked" else PARTIAL)
    units = (terms.mma, terms.exp, terms.fma, terms.alu, terms.smem, None)
    return Cycles(kind, dict(zip(UNITS, units, strict=True)))


def modelled(
    figures: Mapping[tuple[str, str], Figures], shape: Shape, rates: Rates, kind: str
) -> Cycles:
    """From counts: an unmasked or a masked block of every query tile, O not rescaled."""
    way = "shortest" if kind == "unmasked" else "longest"
    rows, singles = WARPS * shape.tiles, 1  # warps that run a role, for all tiles
    runs = (
        ("softmax", way, rows),
        ("correction", "shortest", rows),
        ("mma", "shortest", singles),
        ("load", "shortest", singles),
    )
    weighted = [(figures[r, w], n) for r, w, n in runs if (r, w) in figures]

    def lanes(*pipes: str) -> float:
        return WARP * sum(n * f.pipes[pipe] for f, n in weighted for pipe in pipes)

    flop, operand_bytes = _products(figures, shape)
    traffic = operand_bytes + sum(n * f.smem_bytes for f, n in weighted)
    units = {
        "tensor": flop / rates.mma,
        "MUFU": lanes("MUFU") / rates.mufu,
        "FMA": (lanes("FMA") + 2 * lanes("FMA x2")) / rates.fma,
        "ALU": lanes("ALU") / rates.alu,
        "SMEM": traffic / rates.smem_bytes,
        "issue": sum(n * f.instructions for f, n in weighted) / rates.issue,
    }
    return Cycles(kind, dict(units))


def _products(figures: Mapping[tuple[str, str], Figures], shape: Shape) -> tuple[float, float]:
    """FLOP of a CTA's matrix products in a key block, and bytes of operands they read from SMEM.

    An instruction covers 128 rows of a CTA and 16 of the contracted dimension. S = Q K^T has both
    operands in shared memory, O = P V has P in tensor memory. A pair of CTAs shares B.
    """
    mma = figures.get(("mma", "shortest"))
    if mma is None:
        return 0.0, 0.0
    products = mma.pipes["tensor"]
    qk = shape.tiles * shape.d / MMA_STEP
    pv = max(0.0, products - qk)
    pair = 2 if mma.count("UTCHMMA.2CTA") else 1
    flop = 2 * TILE * MMA_STEP * (qk * TILE + pv * shape.d_v)
    operands = qk * (TILE + TILE / pair) + pv * shape.d_v / pair
    return flop, 2 * MMA_STEP * operands
