"""Pictures of a variant: its tile map, its mask element by element, and what its score mod does.

Needs matplotlib (the `plot` extra), which is imported only when something is drawn. Knows the tile
map and the graph evaluator; nothing of kernels. `Explanation.draw`, the command line and every
`variants/*.py` use it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from fa4core.plan.findings import on_host, point
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import PARTIAL, TileMap, tile_map
from fa4core.variant import Variant
from primitives.expr import algebra
from primitives.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TILES = 128  # tiles along a side that can still be told apart
MAX_ELEMENTS = 192  # elements along a side that can still be told apart
SAMPLES = 384  # points along a side of a heat map

WIDTH, HEIGHT, SIDE = 5.7, 6.55, 4.4  # of a panel and of its axes, inches

EMPTY_COLOUR, PARTIAL_COLOUR, FULL_COLOUR = "#eef0f3", "#f2a541", "#2f6f9f"
INK, FAINT = "#22303c", "#8a97a3"


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib, which is not installed; install it with "
            "`pip install 'fa4core[plot]'` or `pip install matplotlib`"
        ) from error
    return plt


@attrs.frozen
class _View:
    """What is drawn: a variant, one sequence and head of a problem."""

    variant: Variant
    length_q: int
    length_k: int
    b: int
    h: int
    tiles: TileMap

    @property
    def tile(self) -> tuple[int, int]:
        return self.tiles.tile_q, self.tiles.tile_k

    def mask(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """The mask on a grid of queries and keys: bool (len(q), len(k))."""
        (value,) = on_host([self.variant.graph.mask], self._variables(q, k))
        return value.expand(len(q), len(k)).numpy()

    def score(self, q: np.ndarray, k: np.ndarray, score: float = 0.0) -> np.ndarray:
        """The score mod applied to one score everywhere: (len(q), len(k))."""
        variables = self._variables(q, k) | {"score": torch.tensor(float(score))}
        (value,) = on_host([self.variant.graph.score], variables)
        return value.expand(len(q), len(k)).numpy()

    def curve(self, scores: np.ndarray) -> np.ndarray:
        """The score mod as a function of the score, at the first query and key."""
        first = np.zeros(1, dtype=np.int64)
        variables = self._variables(first, first) | {"score": torch.from_numpy(scores)[:, None]}
        (value,) = on_host([self.variant.graph.score], variables, torch.float64)
        return value.expand(len(scores), 1)[:, 0].numpy()

    def _variables(self, q: np.ndarray, k: np.ndarray) -> dict[str, torch.Tensor]:
        index = {"q": torch.from_numpy(q)[:, None], "k": torch.from_numpy(k)[None, :]}
        return point(self.b, self.h, self.length_q, self.length_k) | index


def variant(
    variant: Variant,
    path: str | Path | None = None,
    *,
    seqlen: int | tuple[int, int] = 2048,
    problem: Problem | None = None,
    sequence: int = 0,
    head: int = 0,
    heads: int | None = None,
    tile: tuple[int, int] = (128, 128),
    title: str | None = None,
) -> Figure:
    """Draw a variant: tile map, mask near a tile that the mask cuts, and score mod.

    Args:
        variant: What to draw.
        path: A file to write, by its ending (`.png`, `.svg`, `.pdf`); None writes none.
        seqlen: Queries and keys, or (queries, keys). Ignored if `problem` is given.
        problem: Sizes; `sequence` chooses the one that is drawn.
        sequence: Sequence of the batch, `b`.
        head: Query head, `h`.
        heads: Query heads there are, if no `problem` is given; at least `head + 1`.
        tile: Queries and keys in a tile. Grown by a whole factor where there are too many tiles
            to tell apart; the title says so.
        title: Above the figure; the names of mask and score mod by default.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: There is no such sequence or head, or nothing to draw in it.
    """
    plt = _pyplot()
    view = _view(variant, seqlen, problem, sequence, head, heads, tile)
    modified = view.variant.graph.score is not algebra.var("score")
    panels = 3 if modified else 2
    figure = plt.figure(figsize=(WIDTH * panels, HEIGHT))
    axes = [figure.add_axes(_place(i, panels, 1.25, SIDE, SIDE)) for i in range(panels)]
    _draw_tiles(axes[0], view)
    _draw_elements(axes[0], axes[1], view)
    if modified:
        _draw_score(figure, axes[2], view, _place(2, panels, 0.45, 0.14, SIDE))
    name = variant.mask.name + (f"  ·  {variant.score.name}" if modified else "")
    figure.text(
        0.5,
        1 - 0.36 / HEIGHT,
        _shorten(title or name, 34 * panels),
        fontsize=14,
        color=INK,
        weight="bold",
        ha="center",
        va="center",
    )
    if path is not None:
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)
    return figure


def _view(
    variant: Variant,
    seqlen: int | tuple[int, int],
    problem: Problem | None,
    sequence: int,
    head: int,
    heads: int | None,
    tile: tuple[int, int],
) -> _View:
    if problem is None:
        lengths = (seqlen, seqlen) if isinstance(seqlen, int) else seqlen
        batch, count = sequence + 1, max(heads or 0, head + 1)
    else:
        if not 0 <= sequence < problem.batch or not 0 <= head < problem.heads_q:
            raise ValueError(
                f"sequence {sequence}, head {head} of a problem with "
                f"{counted(problem.batch, 'sequence')} and {counted(problem.heads_q, 'query head')}"
            )
        lengths = problem.seqlens_q[sequence], problem.seqlens_k[sequence]
        batch, count = problem.batch, problem.heads_q
    if min(lengths) < 1:
        raise ValueError(
            f"sequence {sequence} has {lengths[0]} queries and {lengths[1]} keys; choose one "
            "with at least one of each"
        )
    grown = max(1, *(-(-n // (t * MAX_TILES)) for n, t in zip(lengths, tile, strict=True)))
    # Only the sequence drawn is analysed: the others are given no rows.
    tiles = tile_map(
        variant.graph.mask,
        batch=batch,
        heads=count,
        seqlens_q=[lengths[0] if b == sequence else 0 for b in range(batch)],
        seqlens_k=[lengths[1] if b == sequence else 0 for b in range(batch)],
        tile_q=tile[0] * grown,
        tile_k=tile[1] * grown,
    )
    return _View(variant, *lengths, sequence, head, tiles)


def _place(
    panel: int, panels: int, bottom: float, height: float, width: float
) -> tuple[float, float, float, float]:
    """Axes of a panel as shares of the figure, from inches."""
    across = WIDTH * panels
    left = panel * WIDTH + 0.98
    return left / across, bottom / HEIGHT, width / across, height / HEIGHT


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _finish(axes: Axes, title: str, x: str = "keys", y: str = "queries") -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_title(title, fontsize=10.5, color=INK, pad=8)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=FAINT, labelsize=8, length=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for spine in axes.spines.values():
        spine.set_color("#c6ced5")


def _grid(
    axes: Axes, starts: tuple[int, int], ends: tuple[int, int], step: tuple[int, int]
) -> None:
    """Thin white lines between cells, where there are few enough of them."""
    count = max((e - s) / t for s, e, t in zip(starts, ends, step, strict=True))
    if count > 96:
        return
    width = min(0.6, 20 / count)
    for edge in range(starts[0], ends[0] + 1, step[0]):
        axes.axhline(edge, color="white", linewidth=width)
    for edge in range(starts[1], ends[1] + 1, step[1]):
        axes.axvline(edge, color="white", linewidth=width)


def _draw_tiles(axes: Axes, view: _View) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    kinds = view.tiles.dense(view.b, view.h)
    (tile_q, tile_k), (rows, columns) = view.tile, kinds.shape
    extent = (0, columns * tile_k, rows * tile_q, 0)
    colours = ListedColormap([EMPTY_COLOUR, PARTIAL_COLOUR, FULL_COLOUR])
    axes.imshow(kinds, cmap=colours, vmin=0, vmax=2, extent=extent, interpolation="nearest")
    _grid(axes, (0, 0), (rows * tile_q, columns * tile_k), (tile_q, tile_k))
    axes.set_aspect("auto")
    axes.set_xlim(0, min(view.length_k, columns * tile_k))
    axes.set_ylim(min(view.length_q, rows * tile_q), 0)
    total = kinds.size
    handles = [
        Patch(facecolor=c, edgecolor="#c6ced5", label=f"{n}  {(kinds == i).sum() / total:.1%}")
        for i, (n, c) in enumerate(
            (("EMPTY", EMPTY_COLOUR), ("PARTIAL", PARTIAL_COLOUR), ("FULL", FULL_COLOUR))
        )
    ]
    _legend(axes, handles)
    where = f", head {view.h}" if "h" in view.variant.graph.mask.free else ""
    _finish(axes, f"tile map: {rows:,} x {columns:,} tiles of {tile_q} x {tile_k}{where}")


def _legend(axes: Axes, handles: list) -> None:
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.125),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.6,
        labelcolor=INK,
    )


def _draw_elements(map_axes: Axes, axes: Axes, view: _View) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch, Rectangle

    (q0, q1), (k0, k1) = _window(view)
    attended = view.mask(np.arange(q0, q1), np.arange(k0, k1))
    colours = ListedColormap([EMPTY_COLOUR, FULL_COLOUR])
    axes.imshow(
        attended, cmap=colours, vmin=0, vmax=1, extent=(k0, k1, q1, q0), interpolation="nearest"
    )
    if max(q1 - q0, k1 - k0) <= 64:
        _grid(axes, (q0, k0), (q1, k1), (1, 1))
    for edge in range(-(-q0 // view.tile[0]) * view.tile[0], q1, view.tile[0]):
        axes.axhline(edge, color=PARTIAL_COLOUR, linewidth=1.0, linestyle=(0, (4, 3)))
    for edge in range(-(-k0 // view.tile[1]) * view.tile[1], k1, view.tile[1]):
        axes.axvline(edge, color=PARTIAL_COLOUR, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xlim(k0, k1)
    axes.set_ylim(q1, q0)
    axes.set_aspect("auto")
    _legend(
        axes,
        [
            Patch(facecolor=FULL_COLOUR, label="attended"),
            Patch(facecolor=EMPTY_COLOUR, edgecolor="#c6ced5", label="not attended"),
        ],
    )
    whole = (q1 - q0, k1 - k0) == (view.length_q, view.length_k)
    _finish(axes, "mask, every element" if whole else "mask, every element of the frame")
    if not whole:
        frame = Rectangle(
            (k0, q0), k1 - k0, q1 - q0, fill=False, edgecolor="#b3261e", linewidth=1.8, zorder=5
        )
        map_axes.add_patch(frame)
        if (k1 - k0) < 0.02 * view.length_k or (q1 - q0) < 0.02 * view.length_q:
            # Too small to see: a ring around it.
            map_axes.plot(
                [(k0 + k1) / 2],
                [(q0 + q1) / 2],
                marker="o",
                markersize=11,
                markerfacecolor="none",
                markeredgecolor="#b3261e",
                markeredgewidth=1.8,
                zorder=6,
            )
        for spine in axes.spines.values():
            spine.set_color("#b3261e")
            spine.set_linewidth(1.5)


def _window(view: _View) -> tuple[tuple[int, int], tuple[int, int]]:
    """Queries and keys to show element by element: where most neighbours differ.

    Tried are frames around up to 24 partial tiles, spread evenly over them.
    """
    rows, columns = min(view.length_q, MAX_ELEMENTS), min(view.length_k, MAX_ELEMENTS)
    partial = np.argwhere(view.tiles.dense(view.b, view.h) == PARTIAL)
    chosen = partial[np.linspace(0, len(partial) - 1, min(len(partial), 24)).astype(int)]
    corners = {(view.length_q // 2, view.length_k // 2): None} | {
        (int(i) * view.tile[0], int(j) * view.tile[1]): None for i, j in chosen
    }
    best, most = ((0, rows), (0, columns)), -1
    for q, k in corners:
        q0 = min(max(0, q - rows // 6), view.length_q - rows)
        k0 = min(max(0, k - columns // 6), view.length_k - columns)
        part = view.mask(np.arange(q0, q0 + rows), np.arange(k0, k0 + columns))
        edges = int(np.diff(part, axis=0).sum() + np.diff(part, axis=1).sum())
        if edges > most:
            best, most = ((q0, q0 + rows), (k0, k0 + columns)), edges
    return best


def _draw_score(
    figure: Figure, axes: Axes, view: _View, bar_place: tuple[float, float, float, float]
) -> None:
    if not view.variant.graph.score.free & {"q", "k"}:
        _draw_curve(axes, view)
        return
    q, k = (
        np.unique(np.linspace(0, n - 1, min(n, SAMPLES)).astype(np.int64))
        for n in (view.length_q, view.length_k)
    )
    score, value = _telling(view, q, k)
    low, high = (np.nanmin(value), np.nanmax(value)) if not np.isnan(value).all() else (0, 1)
    diverging = low < 0 < high
    limit = max(-low, high)
    image = axes.imshow(
        value,
        cmap="RdBu_r" if diverging else "viridis",
        vmin=-limit if diverging else low,
        vmax=limit if diverging else high,
        extent=(0, view.length_k, view.length_q, 0),
        interpolation="nearest",
    )
    axes.set_facecolor(EMPTY_COLOUR)
    axes.set_aspect("auto")
    bar = figure.colorbar(image, cax=figure.add_axes(bar_place), orientation="horizontal")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=FAINT, length=3)
    where = f", head {view.h}" if "h" in view.variant.graph.score.free else ""
    _finish(axes, f"score mod applied to a score of {score}{where}")


def _telling(view: _View, q: np.ndarray, k: np.ndarray) -> tuple[int, np.ndarray]:
    """A score at which the score mod differs from place to place, and what it makes of it.

    That is 0, unless the mod does the same to it everywhere, as a factor does: then 1.
    """
    mask = view.mask(q, k)
    for score in (0, 1):
        value = np.where(mask, view.score(q, k, score), np.nan)
        value = np.where(np.isfinite(value), value, np.nan)
        if np.unique(value[~np.isnan(value)]).size > 1:
            return score, value
    return score, value


def _draw_curve(axes: Axes, view: _View) -> None:
    """A score mod that depends on the score only (softcap): its curve says more than a map."""
    scores = np.linspace(-100, 100, 401)
    axes.plot(scores, scores, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), label="unchanged")
    axes.plot(scores, view.curve(scores), color=FULL_COLOUR, linewidth=2.2, label="score mod")
    axes.axhline(0, color="#d9dee3", linewidth=0.8, zorder=0)
    axes.axvline(0, color="#d9dee3", linewidth=0.8, zorder=0)
    axes.set_xlim(-100, 100)
    _legend(axes, axes.get_legend_handles_labels()[0])
    _finish(axes, "score mod, the same at every position", "score before", "score after")
