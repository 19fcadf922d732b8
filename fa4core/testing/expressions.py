"""Random mask and score functions as source text: index arithmetic as users write it.

The grammar holds what FlexAttention users write: comparisons of linear index expressions, `//`,
`%`, `abs`, `where`, min and max, bit operations, and tables indexed by indices and by computed
ones. Integers stay below 2**31, float comparisons are of numbers that are exact in float32, so
every correct evaluation agrees to the last element. Used by `strategies`.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis.strategies import DrawFn, booleans, composite, integers, sampled_from

from fa4core.testing.case import Limits

#: Spellings of an element of a 2-d table, and the table's further dimensions before and behind.
_VIEWS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("{t}[{i}]", (), ()),
    ("{t}.T[{i}]", (), ()),
    ("{t}[1, {i}]", (2,), ()),
    ("{t}[{i}, 0]", (), (2,)),
)

#: What expressions are made of; positions matter more often than heads and sequences.
_INDICES = ("q_idx", "kv_idx", "(q_idx - kv_idx)", "q_idx", "kv_idx", "h", "b")

_COMPARISONS = ("<=", "<", "==", ">=", ">", "!=")


class _Scope:
    """What one function may use: its tables become default arguments of the lambda."""

    def __init__(self, draw: DrawFn, limits: Limits) -> None:
        self.draw, self.limits = draw, limits
        self.tables: list[str] = []
        self.extents = {
            "b": limits.batch,
            "h": limits.heads,
            "q_idx": limits.seqlen_q,
            "kv_idx": limits.seqlen_k,
        }

    def number(self, low: int, high: int) -> int:
        return self.draw(integers(low, high))

    def pick(self, *options: Callable[[], str]) -> str:
        return self.draw(sampled_from(options))()

    def table(self, make: str) -> str:
        """Declare a table; `make` has `{seed}` in it. The name."""
        name = f"t{len(self.tables)}"
        self.tables.append(f"{name}={make.format(seed=self.number(0, 3))}")
        return name

    def lookup(self, kind: str, tail: str) -> str:
        """An element of a new table: `kind` makes it, `tail` are arguments behind its shape."""
        indices = self.draw(
            sampled_from([("h",), ("kv_idx",), ("q_idx",), ("b", "kv_idx"), ("h", "q_idx")])
        )
        shape = [self.extents[i] for i in indices]
        view = "{t}[{i}]"
        if len(indices) == 2:  # the same element, reached through a view of another table
            view, before, after = self.draw(sampled_from(_VIEWS))
            shape = [*before, *(shape[::-1] if ".T" in view else shape), *after]
        name = self.table(f"{kind}({{seed}}, {', '.join(map(str, shape))}{tail})")
        return view.format(t=name, i=", ".join(indices))

    # ------------------------------------------------------------------------- integers

    def integer(self, depth: int) -> str:
        """An integer expression; always a tensor, never a bare number."""
        if depth == 0:
            return self.draw(sampled_from(_INDICES))
        return self.pick(
            lambda: self.integer(0),
            lambda: f"({self.integer(depth - 1)} - {self.integer(depth - 1)})",
            lambda: f"({self.integer(depth - 1)} + {self.number(-9, 70)})",
            lambda: f"({self.integer(depth - 1)} * {self.number(-3, 4)})",
            lambda: f"({self.integer(depth - 1)} // {self.number(1, 65)})",
            lambda: f"({self.integer(depth - 1)} % {self.number(1, 65)})",
            lambda: f"({self.integer(depth - 1)}).abs()",
            lambda: f"torch.minimum({self.integer(depth - 1)}, {self.integer(depth - 1)})",
            lambda: f"torch.maximum({self.integer(depth - 1)}, {self.integer(depth - 1)})",
            lambda: (
                f"({self.integer(depth - 1)}).clamp({self.number(-5, 5)}, {self.number(6, 99)})"
            ),
            lambda: f"({self.integer(depth - 1)} & {self.number(1, 63)})",
            lambda: f"({self.integer(depth - 1)} ^ {self.number(1, 63)})",
            lambda: f"({self.integer(depth - 1)} << {self.number(1, 2)})",
            lambda: f"({self.integer(depth - 1)} >> {self.number(1, 4)})",
            lambda: self.conditional(depth),
            lambda: self.lookup("integers", f", high={self.number(2, 40)}"),
            lambda: self.computed_lookup(depth - 1),
        )

    def conditional(self, depth: int) -> str:
        options = self.integer(depth - 1), self.integer(depth - 1)
        return f"torch.where({self.boolean(depth - 1)}, {options[0]}, {options[1]})"

    def computed_lookup(self, depth: int) -> str:
        size = self.number(1, 24)
        name = self.table(f"integers({{seed}}, {size}, high={self.number(2, 40)})")
        return f"{name}[{self.integer(depth)} % {size}]"

    # ------------------------------------------------------------------------- booleans

    def boolean(self, depth: int) -> str:
        if depth == 0:
            return self.comparison(0)
        return self.pick(
            lambda: self.comparison(depth - 1),
            lambda: f"({self.boolean(depth - 1)} & {self.boolean(depth - 1)})",
            lambda: f"({self.boolean(depth - 1)} | {self.boolean(depth - 1)})",
            lambda: f"({self.boolean(depth - 1)} ^ {self.boolean(depth - 1)})",
            lambda: f"~{self.boolean(depth - 1)}",
            lambda: f"(({self.integer(depth - 1)}) * 0.5 < {self.number(-8, 40)}.25)",
            lambda: self.lookup("bits", ""),
            self.block_lookup,
        )

    def comparison(self, depth: int) -> str:
        sign = self.draw(sampled_from(_COMPARISONS))
        left = self.integer(depth)
        if self.draw(booleans()):
            return f"({left} {sign} {self.number(-5, 150)})"
        return f"({left} {sign} {self.integer(depth)})"

    def block_lookup(self) -> str:
        """A bool matrix over blocks, as block-sparse masks are written."""
        size = self.number(1, 40)
        rows, columns = (-(-self.extents[i] // size) for i in ("q_idx", "kv_idx"))
        name = self.table(f"bits({{seed}}, {rows}, {columns})")
        return f"{name}[q_idx // {size}, kv_idx // {size}]"

    # --------------------------------------------------------------------------- scores

    def score(self, depth: int) -> str:
        """A smooth function of the score and of indices; no kinks, so gradients are stable."""
        if depth == 0:
            return "score"
        inner = self.score(depth - 1)
        return self.pick(
            lambda: inner,
            lambda: f"({inner} * {self.draw(sampled_from(['0.5', '-1.25', '2.0']))})",
            lambda: f"({inner} + 0.0625 * {self.integer(1)} % 7)",
            lambda: f"torch.tanh({inner} / 4.0) * 4.0",
            lambda: f"torch.sigmoid({inner})",
            lambda: f"torch.where({self.boolean(1)}, {inner}, {inner} * 0.5 + 1.0)",
            lambda: f"({inner} + {self.lookup('normal', '')})",
            lambda: f"({inner} * {self.lookup('normal', '')})",
            lambda: f"({inner} + {self.twice()})",
            lambda: f"({inner} * torch.exp(-0.03125 * (q_idx - kv_idx).abs()))",
        )

    def twice(self) -> str:
        """Two indexings of one captured table, whose gradients must both arrive."""
        size = self.number(1, 12)
        name = self.table(f"normal({{seed}}, {size})")
        return f"({name}[q_idx % {size}] - {name}[kv_idx % {size}])"

    def function(self, arguments: str, body: str) -> str:
        return f"lambda {', '.join([arguments, *self.tables])}: {body}"


@composite
def mask_functions(draw: DrawFn, limits: Limits, depth: int = 2) -> str:
    """Source of a random mask function of (b, h, q_idx, kv_idx)."""
    scope = _Scope(draw, limits)
    body = scope.boolean(depth)
    return scope.function("b, h, q_idx, kv_idx", body)


@composite
def score_functions(draw: DrawFn, limits: Limits, depth: int = 2) -> str:
    """Source of a random score function of (score, b, h, q_idx, kv_idx)."""
    scope = _Scope(draw, limits)
    body = scope.score(depth)
    return scope.function("score, b, h, q_idx, kv_idx", body)
