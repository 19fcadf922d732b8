"""The public testing kit: property-test a variant, a backend, or a mask of your own.

* `assert_variant_correct(variant)`: forward, backward and tile map over shapes, layouts and dtypes.
* `assert_case_correct(case)`: one call, as the strategies draw them; `run`, `judge` and
  `assert_close_to_oracle` are its parts, for calls of your own.
* `check_gradients(variant)`: derivatives against finite differences.
* `check_tile_map(mask)`: soundness of the tile map by brute force.
* `fa4core.testing.strategies`: Hypothesis strategies; needs Hypothesis.
* `oracle`, `plain`, `tolerance`: what results are compared with, and how.

The kit computes whole score matrices: use it for problems of some thousand tokens at most.
"""

from fa4core.reference.oracle import oracle
from fa4core.testing.case import Case, Inputs, LayoutSpec, Limits, Shape
from fa4core.testing.check import (
    assert_case_correct,
    assert_close_to_oracle,
    by_backend,
    default_exp,
    judge,
    run,
)
from fa4core.testing.dense import Outputs, plain
from fa4core.testing.gradients import check_gradients
from fa4core.testing.source import build
from fa4core.testing.tilemap import TileCheck, check_tile_map
from fa4core.testing.tolerance import Comparison, compare, floor
from fa4core.testing.whole import assert_variant_correct, shapes_up_to

__all__ = [
    "Case",
    "Comparison",
    "Inputs",
    "LayoutSpec",
    "Limits",
    "Outputs",
    "Shape",
    "TileCheck",
    "assert_case_correct",
    "assert_close_to_oracle",
    "assert_variant_correct",
    "build",
    "by_backend",
    "check_gradients",
    "check_tile_map",
    "compare",
    "default_exp",
    "floor",
    "judge",
    "oracle",
    "plain",
    "run",
    "shapes_up_to",
]
