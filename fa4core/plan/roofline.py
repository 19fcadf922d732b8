"""The roofline of one tile: cycles that each unit of an SM needs, and which of them binds.

Follows FlashAttention-4, section 3 (arXiv 2603.05451, tables 1 and 3), which counts tensor cores,
shared memory and exponentials. Score mods and masks add what their expression graphs cost, on the
same units and on two the paper leaves out (FMA and ALU), so that one can see when a mod becomes
the bound. `makespan` and `explain` use it; it knows targets and graphs, no kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from fa4core.plan.target import Target
from primitives.exp import Exp
from primitives.expr import Node, walk

BYTES = 2  # of a bf16 or fp16 element
ACCUMULATOR_BYTES = 4


@attrs.frozen
class Work:
    """Operations per score (per query and key), by the unit that executes them.

    Attributes:
        mufu: On the multi-function unit: exp2, log2, tanh, reciprocals, ...
        fma: Floating-point additions, multiplications and multiply-adds.
        alu: Comparisons, selections, minima, integer operations, conversions.
        loads: Elements read from captured tensors.
    """

    mufu: float = 0.0
    fma: float = 0.0
    alu: float = 0.0
    loads: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.mufu + other.mufu,
            self.fma + other.fma,
            self.alu + other.alu,
            self.loads + other.loads,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(self.mufu * factor, self.fma * factor, self.alu * factor, self.loads * factor)


# What the compiler makes of each float function: MUFU operations and the FMAs around them.
# sigmoid is 1 / (1 + 2^(-x log2 e)); pow is 2^(y log2 x); tanh is MUFU.TANH; sinh and cosh take
# e^x and a reciprocal; the rest of the trigonometry and erf are polynomials.
_FUNCTIONS = {
    "exp": Work(1, 1),
    "exp2": Work(1),
    "expm1": Work(1, 2),
    "log": Work(1, 1),
    "log2": Work(1),
    "log1p": Work(1, 2),
    "tanh": Work(1),
    "sigmoid": Work(2, 2),
    "sin": Work(1, 1),
    "cos": Work(1, 1),
    "tan": Work(3, 3),
    "sqrt": Work(1),
    "rsqrt": Work(1),
    "sinh": Work(2, 3),
    "cosh": Work(2, 3),
    "pow": Work(2, 1),
    "erf": Work(1, 10),
    "erfc": Work(1, 12),
    "asin": Work(1, 8),
    "acos": Work(1, 8),
    "atan": Work(1, 10),
    "atan2": Work(1, 12),
    "floor": Work(alu=1),
    "ceil": Work(alu=1),
    "trunc": Work(alu=1),
    "round": Work(alu=1),
    "sign": Work(alu=2),
}


def needs_mufu(score: Node) -> bool:
    """Whether a score mod keeps the multi-function unit busy for every score."""
    return any(
        n.op in _FUNCTIONS and _FUNCTIONS[n.op].mufu and n.free & {"k", "score"}
        for n in walk(score)
    )


_ADDED = {"add": Work(fma=1), "sub": Work(fma=1), "mul": Work(fma=1), "neg": Work()}
_DYNAMIC_DIVISION = Work(mufu=1, fma=4, alu=8)  # an integer division by what varies


def work_of(*roots: Node) -> Work:
    """What evaluating `roots` costs per score; shared subexpressions count once.

    A thread owns a row, so whatever depends on neither the key nor the score is computed once a
    row and is not counted.
    """
    total = Work()
    for node in walk(*roots):
        if _varies(node):
            total += _cost(node)
    return total


def _cost(node: Node) -> Work:
    op, args = node.op, node.args
    if op == "var":
        return Work()
    if op == "gather":
        return Work(alu=max(1, len(args)), loads=1)
    if op in _FUNCTIONS:
        return _FUNCTIONS[op]
    if op == "div":
        # What is the same for a row is inverted once.
        return Work(mufu=1, fma=2) if _varies(args[1]) else Work(fma=1)
    if node.kind == "float" and op in _ADDED:
        return _ADDED[op]
    if op in ("floordiv", "mod"):
        if _varies(args[1]):
            return _DYNAMIC_DIVISION
        if args[1].is_const and args[1].attr > 0 and args[1].attr & (args[1].attr - 1) == 0:
            return Work(alu=1)  # a shift or a bit mask
        return Work(fma=1 + (op == "mod"), alu=2)  # multiply by a reciprocal made beforehand
    if op == "linear":
        scaled = sum(abs(c) != 1 for c, a in zip(node.attr[0], args, strict=True) if _varies(a))
        return Work(fma=scaled, alu=max(0, _terms_of(node) - 1 - scaled))
    if op in ("ge0", "eq0"):
        # x - y >= 0 is one comparison of x and y, so the linear form below saves an addition.
        return Work(alu=0 if args[0].op == "linear" and _terms_of(args[0]) > 1 else 1)
    if op in ("and", "or", "xor"):
        # A comparison combines its result with one predicate for free.
        free = sum(a.kind == "bool" and a.op in ("ge0", "eq0", "le", "lt", "eq") for a in args)
        return Work(alu=max(0, len(args) - 1 - free))
    if op == "mul":  # integers
        return Work(fma=len(args) - 1)
    if op == "abs" and node.kind == "float":
        return Work()  # a modifier of the operand
    return Work(alu=max(1, len(args) - 1) if op in ("min", "max") else 1)


def _varies(node: Node) -> bool:
    """Whether the value differs along a row, so that a thread computes it for every score."""
    return bool(node.free & {"k", "score"})


def _terms_of(linear: Node) -> int:
    """Terms of a linear form; what is the same for a row counts as one, computed beforehand."""
    varying = sum(_varies(a) for a in linear.args)
    return varying + (varying < len(linear.args) or linear.attr[1] != 0)


# The softmax itself, per score: scale and subtract the maximum in one FMA, add to the row sum;
# a three-input maximum takes two scores at a time, and so does the conversion to bf16.
SOFTMAX = Work(fma=2, alu=1)
# The backward pass: exp argument; dP - delta, times P; two conversions.
SOFTMAX_BACKWARD = Work(fma=3, alu=1)


def exponentials(exp: Exp) -> Work:
    """One exponential per score under a policy: MUFU, or a polynomial on FMA and ALU.

    FlashAttention-4, section 3.1: clamp; split into integer and fraction (three additions); a
    polynomial of the fraction by Horner; shift the integer into the exponent (two integer
    operations).
    """
    emulated = Work(fma=3 + exp.degree, alu=3)
    return emulated * exp.fraction + Work(mufu=1 - exp.fraction)


@attrs.frozen
class Terms:
    """Cycles of an SM for one tile, by unit. `mma`, `smem` and `exp` are the paper's.

    Attributes:
        mma: Tensor cores.
        smem: Shared memory, and captured tensors through L1, which shares its bandwidth.
        exp: The multi-function unit: exponentials, and transcendental functions of score mods.
        fma: FP32 multiply-add units.
        alu: Integer and comparison units.
    """

    mma: float
    smem: float
    exp: float
    fma: float
    alu: float

    @property
    def bound(self) -> str:
        """The unit that needs the most cycles; ties go to the first of the fields."""
        return max(attrs.asdict(self), key=lambda name: getattr(self, name))

    @property
    def cycles(self) -> float:
        """Cycles of the unit that binds."""
        return getattr(self, self.bound)


def _units(
    target: Target, scores: float, flop: float, smem_bytes: float, works: Iterable[Work]
) -> Terms:
    rates = target.measured
    work = sum(works, Work())
    return Terms(
        mma=flop / rates.mma,
        smem=(smem_bytes + 4 * work.loads * scores) / rates.smem_bytes,
        exp=work.mufu * scores / rates.mufu,
        fma=work.fma * scores / rates.fma,
        alu=work.alu * scores / rates.alu,
    )


def _operand_bytes(target: Target, m: int, n: int, k: int, a_in_smem: bool, ctas: int) -> float:
    """Bytes that an (m x k) by (k x n) MMA reads from SMEM.

    B is read again for every `mma_rows` rows and A for every `mma_columns` columns. In a 2-CTA
    MMA each CTA reads half of B.
    """
    rates = target.measured
    a = m * k * max(1, n / rates.mma_columns) if a_in_smem else 0
    b = n * k * max(1, m / rates.mma_rows) / ctas
    return BYTES * (a + b)


def forward(
    target: Target,
    m: int,
    n: int,
    d: int,
    d_v: int | None = None,
    *,
    ctas: int = 1,
    exp: Exp = Exp(),  # noqa: B008 (frozen)
    work: Work = Work(),
) -> Terms:
    """The forward pass on a tile of `m` queries by `n` keys (FlashAttention-4, table 1).

    S = Q K^T reads both operands from SMEM; O = P V reads V, since P lies in TMEM (SM100) or in
    registers (SM90).

    Args:
        target: Whose rates.
        m: Queries of one CTA.
        n: Keys.
        d: Head dim of queries and keys.
        d_v: Head dim of values; as `d` by default.
        ctas: CTAs that share an MMA (1 or 2); counts are per CTA.
        exp: How exponentials are computed.
        work: What score mod and mask add per score.
    """
    d_v = d if d_v is None else d_v
    smem = _operand_bytes(target, m, n, d, True, ctas)
    smem += _operand_bytes(target, m, d_v, n, False, ctas)
    return _units(target, m * n, 2 * m * n * (d + d_v), smem, (SOFTMAX, exponentials(exp), work))


def backward(
    target: Target,
    m: int,
    n: int,
    d: int,
    d_v: int | None = None,
    *,
    ctas: int = 1,
    exp: Exp = Exp(),  # noqa: B008
    work: Work = Work(),
) -> Terms:
    """The backward pass on a tile of `m` queries by `n` keys (FlashAttention-4, table 3).

    Five MMAs: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q (the last two with their A
    operand in TMEM or registers) and dQ = dS K. Besides their operands, dS is written once, and
    dQ is written and read in fp32 on its way to global memory.

    With two CTAs each reads half of every B operand. But a CTA forms dQ for half of the queries
    over the keys of both: half as much of it goes through shared memory, its B operand is as large
    as before, and half of dS is read for the other CTA, half of that one's written. For 128^3 these
    are 2,560 cycles. The paper's table has 2,688: so many are left if one halves all five B
    operands and nothing else.

    Args:
        target: Whose rates.
        m: Queries.
        n: Keys of one CTA.
        d: Head dim of queries and keys.
        d_v: Head dim of values; as `d` by default.
        ctas: CTAs that share an MMA (1 or 2); counts are per CTA.
        exp: How exponentials are computed.
        work: What score mod, its derivative and the mask add per score.
    """
    d_v = d if d_v is None else d_v
    smem = _operand_bytes(target, n, m, d, True, ctas)  # S^T
    smem += _operand_bytes(target, n, m, d_v, True, ctas)  # dP^T
    smem += _operand_bytes(target, n, d_v, m, False, ctas)  # dV
    smem += _operand_bytes(target, n, d, m, False, ctas)  # dK
    own = m // ctas  # queries of its dQ
    smem += _operand_bytes(target, own, d, n * ctas, True, ctas)  # dQ
    smem += BYTES * m * n + 2 * ACCUMULATOR_BYTES * own * d
    smem += 2 * BYTES * (m - own) * n  # dS to the other CTA, and from it
    flop = 2 * m * n * (3 * d + 2 * d_v)
    return _units(target, m * n, flop, smem, (SOFTMAX_BACKWARD, exponentials(exp), work))
