"""What a user should know about a variant on a problem before running it.

Rows with nothing to attend to, score mods that level out others, captured tensors that may be
indexed outside, inputs that are copied. `explain` reports them. Evaluates graphs with torch, in
bounded chunks; never O(S^2) memory or time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from fa4core.lowering.bounds import possible_out_of_range
from fa4core.lowering.torch import evaluate
from fa4core.plan.problem import Problem
from fa4core.plan.strides import copy_reason
from fa4core.plan.tiles import FULL, TileMap
from fa4core.variant import Variant
from primitives.expr import Capture, Node, captures, walk

#: Elements of a mask that may be evaluated to find rows with nothing to attend to: about half a
#: second; and how many at a time.
BUDGET = 1 << 24
CHUNK = 1 << 21


@attrs.frozen
class EmptyRows:
    """Rows with nothing to attend to: between `at_least` and `at_most` of `rows`.

    Attributes:
        at_least: Rows known to have no key.
        at_most: `at_least` and the rows that were left undecided.
        rows: All rows, over sequences and query heads.
        example: (sequence, head, query) of one, or None.
    """

    at_least: int
    at_most: int
    rows: int
    example: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        if self.at_most == 0:
            return "none"
        if self.at_least == self.at_most:
            return f"{self.at_least:,} of {self.rows:,}"
        if self.at_least == 0:
            return f"at most {self.at_most:,} of {self.rows:,}"
        return f"at least {self.at_least:,}, at most {self.at_most:,} of {self.rows:,}"


@attrs.frozen
class Flattened:
    """A score mod in a chain that levels out what the one before it does, as a cap does.

    Attributes:
        first: Name of the one applied first.
        second: Name of the one applied second.
        share: Of the probed pairs that are attended to, those where nine tenths of what `first`
            changes are lost.
    """

    first: str
    second: str
    share: float

    def __str__(self) -> str:
        return (
            f"{self.second} levels out what {self.first} does: at {self.share:.0%} of the probed "
            f"pairs nine tenths of it are lost; if that isn't meant, write {self.second} >> "
            f"{self.first}"
        )


@attrs.frozen
class OutOfRange:
    """An index into a captured tensor that may leave the tensor.

    Attributes:
        where: "mask", "score mod" or "sink".
        tensor: The captured tensor, as text.
        dim: The dimension.
        size: Its size.
        low: Least value the index may take.
        high: Greatest value.
    """

    where: str
    tensor: str
    dim: int
    size: int
    low: int
    high: int

    def __str__(self) -> str:
        return (
            f"the {self.where} may index dimension {self.dim} (size {self.size}) of "
            f"{self.tensor} by {self.low}..{self.high}"
        )


# ------------------------------------------------------------------------------- empty rows


def empty_rows(mask: Node, tiles: TileMap, budget: int = BUDGET) -> EmptyRows:
    """Count the rows that attend to no key.

    Query tiles without key tiles have empty rows only, query tiles with a full key tile none; the
    rows of the others are evaluated, until `budget` elements are used up.

    Args:
        mask: The mask that `tiles` was made of.
        tiles: Its tile map.
        budget: Elements that may be evaluated.
    """
    counts = np.zeros(3, dtype=np.int64)  # at least, undecided, all
    example = None
    visited, full = tiles.lengths(), tiles.lengths(FULL)
    first = 0  # of the tiles of (b, h) in the order of `lengths`
    left = budget
    known: dict[tuple, tuple[int, int, int | None]] = {}
    for b, h in itertools.product(range(tiles.batch), range(tiles.heads)):
        here = slice(first, first + tiles.tiles_q(b))
        first = here.stop
        same = (
            b if "b" in mask.free else None,
            h if "h" in mask.free else None,
            tiles.seqlens_q[b],
            tiles.seqlens_k[b],
        )
        if same not in known:
            found, undecided, query, used = _of_head(
                mask, tiles, b, h, visited[here] == 0, full[here] == 0, left
            )
            known[same] = found, undecided, query
            left -= used
        found, undecided, query = known[same]
        counts += (found, undecided, tiles.seqlens_q[b])
        if example is None and query is not None:
            example = (b, h, query)
    least, undecided, rows = (int(n) for n in counts)
    return EmptyRows(least, least + undecided, rows, example)


def _of_head(
    mask: Node, tiles: TileMap, b: int, h: int, empty: np.ndarray, unsure: np.ndarray, budget: int
) -> tuple[int, int, int | None, int]:
    """Empty rows, undecided rows, one empty row, and elements evaluated, of one (b, h)."""
    size, length = tiles.tile_q, tiles.seqlens_q[b]
    alone = np.zeros(len(empty) * size, dtype=bool)  # of every row: nothing attended to
    alone[:length] = np.repeat(empty, size)[:length]
    open_tiles = np.flatnonzero(unsure & ~empty)
    # Work forward from the last key tile of every query tile: most masks let a query see itself.
    pending = {int(i): tiles.row(b, h, int(i))[0][::-1] for i in open_tiles}
    alone.reshape(-1, size)[open_tiles] = True
    alone[length:] = False
    used = 0
    for turn in itertools.count():
        now = [i for i, keys in pending.items() if turn < len(keys) and _some(alone, i, size)]
        cost = len(now) * size * tiles.tile_k
        if not now or used + cost > budget:
            break
        used += cost
        at_once = max(1, CHUNK // (size * tiles.tile_k))
        for start in range(0, len(now), at_once):
            chosen = np.array(now[start : start + at_once])
            keys = np.array([pending[i][turn] for i in chosen])
            seen = _attends(mask, tiles, b, h, chosen, keys)
            alone.reshape(-1, size)[chosen] &= ~seen
    undecided = int(alone.reshape(-1, size)[now].sum())  # the budget ended before these did
    alone.reshape(-1, size)[now] = False
    where = np.flatnonzero(alone)
    return len(where), undecided, int(where[0]) if len(where) else None, used


def _some(rows: np.ndarray, i: int, size: int) -> bool:
    return bool(rows[i * size : (i + 1) * size].any())


def _attends(
    mask: Node, tiles: TileMap, b: int, h: int, i: np.ndarray, j: np.ndarray
) -> np.ndarray:
    """Whether each row of query tiles `i` attends to a key of key tile `j`: (tiles, tile_q)."""
    length_q, length_k = tiles.seqlens_q[b], tiles.seqlens_k[b]
    q = torch.from_numpy(i)[:, None, None] * tiles.tile_q + torch.arange(tiles.tile_q)[:, None]
    k = torch.from_numpy(j)[:, None, None] * tiles.tile_k + torch.arange(tiles.tile_k)
    variables = point(b, h, length_q, length_k) | {
        "q": q.clamp(max=length_q - 1),  # rows past the end ask again for the last one
        "k": k.clamp(max=length_k - 1),
    }
    (value,) = on_host([mask], variables)
    return value.expand(len(i), tiles.tile_q, tiles.tile_k).any(dim=-1).numpy()


def on_host(
    roots: Sequence[Node],
    variables: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Values of `roots` on the CPU, wherever the captured tensors are, without gradients."""
    tensors = {c: c.tensor.detach().cpu() for c in captures(*roots) if c.tensor is not None}
    with torch.no_grad():
        return evaluate(roots, variables, tensors, dtype)


def point(b: int, h: int, length_q: int, length_k: int) -> dict[str, torch.Tensor]:
    """The variables of one sequence and head as 0-d tensors."""
    values = {"b": b, "h": h, "seqlen_q": length_q, "seqlen_k": length_k}
    return {name: torch.tensor(value) for name, value in values.items()}


# ------------------------------------------------------------------------------- score mods


def flattened(variant: Variant, problem: Problem, probes: int = 1024) -> list[Flattened]:
    """Neighbours in a chain of score mods of which the second levels out the first.

    Decided by evaluating them at random scores (standard deviation 10) and positions that are
    attended to, in float64: there the second changes with its score by less than a tenth of what
    it would without the first. That every order of two mods is another function is no finding:
    `>>` says the order.
    """
    parts = variant.score.parts
    if len(parts) < 2 or not any(problem.seqlens_q) or not any(problem.seqlens_k):
        return []
    variables = _probes(problem, probes)
    (live,) = on_host([variant.graph.mask], variables)
    found: list[Flattened] = []
    for a, b in itertools.pairwise(parts):
        (moved,) = on_host([a.expr], variables, torch.float64)
        before, after = (
            _slope(b.expr, variables | {"score": score}) for score in (variables["score"], moved)
        )
        lost = (live & (after < 0.1 * before)).expand(probes)
        share = float(lost.sum()) / max(1, int(live.expand(probes).sum()))
        if share > 0.25:
            found.append(Flattened(a.name, b.name, share))
    return found


def _slope(score: Node, variables: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How much a score mod changes with its score."""
    low, high = (
        on_host([score], {**variables, "score": variables["score"] + step}, torch.float64)[0]
        for step in (-0.5, 0.5)
    )
    return (high - low).abs()


def _probes(problem: Problem, count: int) -> dict[str, torch.Tensor]:
    """Random scores at random positions, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(q, k) for q, k in zip(problem.seqlens_q, problem.seqlens_k, strict=True)]
    usable = torch.tensor([b for b, (q, k) in enumerate(lengths) if q and k])
    if not len(usable):
        usable = torch.zeros(1, dtype=torch.int64)
    b = usable[torch.randint(len(usable), (count,), generator=generator)]
    length_q, length_k = torch.tensor(lengths)[b].unbind(-1)
    part = torch.rand(3, count, generator=generator, dtype=torch.float64)
    return {
        "b": b,
        "h": (part[0] * problem.heads_q).long(),
        "q": (part[1] * length_q).long(),
        "k": (part[2] * length_k).long(),
        "seqlen_q": length_q,
        "seqlen_k": length_k,
        "score": 10 * torch.randn(count, generator=generator, dtype=torch.float64),
    }


def masks_through_scores(score: Node) -> bool:
    """Whether a score mod can return -inf by a constant: a mask that skips no tile."""
    return any(n.is_const and n.attr == -math.inf for n in walk(score) if n.kind == "float")


# ------------------------------------------------------------------------------ arguments


def out_of_range(variant: Variant, problem: Problem) -> list[OutOfRange]:
    """Indices into captured tensors that interval analysis can't prove to stay inside."""
    found = []
    graph = variant.graph
    for where, root in (("mask", graph.mask), ("score mod", graph.score), ("sink", graph.sink)):
        for capture, dim, low, high in possible_out_of_range(
            root, problem.batch, problem.heads_q, problem.seqlens_q, problem.seqlens_k
        ):
            size = _size(capture, dim)
            found.append(OutOfRange(where, repr(capture), dim, size, low, high))
    return found


def _size(capture: Capture, dim: int) -> int:
    assert capture.tensor is not None
    return capture.tensor.shape[dim]


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Why each input that a kernel can't read in place has to be copied."""
    reasons = ((n, copy_reason(t, queries=n == "q")) for n, t in tensors.items())
    return {n: reason for n, reason in reasons if reason is not None}
