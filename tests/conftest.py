"""Settings of the whole suite: one torch thread, rare garbage collection, Hypothesis profiles.

`HYPOTHESIS_PROFILE=sweep pytest -m sweep` runs the long version of everything.
"""

from __future__ import annotations

import gc
import os

import torch
from hypothesis import HealthCheck, settings

# Small problems: more threads only contend, above all under pytest-xdist.
torch.set_num_threads(1)

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

# The default is deterministic, so that a run of the suite says something about the change at hand;
# the sweep looks for new examples each time.
settings.register_profile(
    "default", max_examples=20, deadline=None, derandomize=True, suppress_health_check=_QUIET
)
settings.register_profile(
    "sweep", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=_QUIET
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_finish() -> None:
    """Compiling a kernel makes many small objects; to look for garbage among all those of torch and
    of the suite each time costs a seventh of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
