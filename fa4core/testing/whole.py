"""A whole variant in one line: all kinds of calls of it, and its tile map."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from fa4core.testing.case import Case, LayoutSpec, Shape
from fa4core.testing.check import by_backend, default_exp, judge, run
from fa4core.testing.tilemap import check_tile_map
from fa4core.testing.tolerance import report
from fa4core.variant import Variant

#: Layouts that `assert_variant_correct` tries.
LAYOUTS = (LayoutSpec(), LayoutSpec("varlen"), LayoutSpec("seqused", slack=3), LayoutSpec("paged"))


def shapes_up_to(
    *, batch: int = 2, heads_q: int = 4, heads_kv: int = 2, max_seqlen: int = 200
) -> tuple[Shape, ...]:
    """A few telling shapes: one element, tile edges, ragged, more queries than keys, no keys."""
    pairs = [(1, 1), (64, 64), (65, 130), (130, 63), (129, 200), (7, 128), (5, 0)]
    pairs = [(min(m, max_seqlen), min(n, max_seqlen)) for m, n in pairs]
    dims = [(64, 64), (8, 8), (64, 32), (40, 40), (128, 64)]
    rows = []
    for i in range(0, len(pairs), batch):
        lengths = (pairs[i : i + batch] * batch)[:batch]
        seqlens_q, seqlens_k = zip(*lengths, strict=True)
        rows.append(Shape(seqlens_q, seqlens_k, heads_q, heads_kv, *dims[i // batch % len(dims)]))
    return tuple(dict.fromkeys(rows))


def assert_variant_correct(
    variant: Variant | Callable[[Shape], Variant],
    *,
    shapes: Sequence[Shape] | None = None,
    layouts: Sequence[LayoutSpec] = LAYOUTS,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    backend: str = "auto",
    backward: bool = True,
    tile_map: bool = True,
    deterministic: bool = False,
    scale: float | None = None,
    seed: int = 0,
) -> None:
    """Check a variant: forward, backward and tile map, over shapes, layouts and dtypes.

    Each shape runs in each layout, with the dtypes in turn; every combination that is not run
    shares its shape, its layout and its dtype with some that are.

    Args:
        variant: To be checked; a function of the shape if its tables depend on it.
        shapes: Default `shapes_up_to()`, two sequences of at most 200 and four query heads. Choose
            your own if the variant's tables are smaller: `shapes_up_to(heads_q=2, heads_kv=1)`.
        layouts: How sequences lie. Shapes with sequences of several lengths run padded with
            `seqused` where "fixed" is asked for.
        dtypes: Of queries, keys and values.
        backend: As `fa4core.attention`.
        backward: Also all gradients.
        tile_map: Also the soundness of the tile map; see `check_tile_map`.
        deterministic: Ask for deterministic gradients, run each call twice and compare the bits.
        scale: Of the scores.
        seed: Of the data.

    Raises:
        AssertionError: With a report of everything that is wrong.
        IndexError: The variant's tables are too small for `shapes`.
    """
    shapes = shapes_up_to() if shapes is None else shapes
    failures: list[str] = []
    cases = 0
    for i, shape in enumerate(shapes):
        chosen = variant if isinstance(variant, Variant) else variant(shape)
        for j, given in enumerate(layouts):
            ragged = given.kind == "fixed" and not shape.is_uniform
            layout = attrs.evolve(given, kind="seqused") if ragged else given
            dtype = dtypes[(i + j) % len(dtypes)]
            case = Case("...", shape, layout, dtype=dtype, seed=seed)
            failures += _failures(case, chosen, backend, backward, deterministic, scale)
            cases += 1
        if tile_map:
            found = check_tile_map(
                chosen, heads=shape.heads_q, seqlens_q=shape.seqlens_q, seqlens_k=shape.seqlens_k
            )
            failures += [] if found.sound else [f"{shape}\n  {found}"]
    if failures:
        raise AssertionError(
            f"{len(failures)} of {cases} calls of {chosen.mask!r}, {chosen.score!r} are wrong:\n"
            + "\n".join(failures)
        )


def _failures(
    case: Case,
    variant: Variant,
    backend: str,
    backward: bool,
    deterministic: bool,
    scale: float | None,
) -> list[str]:
    inputs = case.inputs(variant)
    attend = by_backend(backend, deterministic=deterministic)
    try:
        results = run(attend, inputs, scale=scale, backward=backward)
    except IndexError as error:
        raise IndexError(
            f"{error}\nThe variant was run with {case.shape}; give `shapes` that its tables serve "
            "(see `shapes_up_to`), or pass a function that makes the variant of a shape"
        ) from error
    comparisons = judge(results, inputs, scale=scale, exp=default_exp(backend, inputs))
    differ: list[str] = []
    if deterministic:
        again = run(attend, inputs, scale=scale, backward=backward)
        differ = [name for name in results if not torch.equal(results[name], again[name])]
    if all(c.ok for c in comparisons) and not differ:
        return []
    text = f"{case.shape} {case.layout} {case.dtype}\n{report(comparisons)}\n"
    text += f"  not the same bits in two runs: {', '.join(differ)}\n" if differ else ""
    options = f", backend={backend!r}" + (", deterministic=True" if deterministic else "")
    return [
        f"{text}  again: assert_variant_correct(variant, shapes=[{case.shape}], "
        f"layouts=[{case.layout}], dtypes=[{case.dtype!r}]{options})"
    ]
