"""Primitives with primitives: some cells of the composition table by default, all in the sweep.

`python tests/composition/table.py` runs every cell and prints the table as a page.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cells import execute
from features import FEATURES, Feature, together

Pair = tuple[Feature, Feature]


def name(pair: Pair) -> str:
    return " x ".join(f.name for f in pair)


def lacks(target: str, pair: Pair) -> bool:
    """Whether the target has no hardware for one of the two."""
    return any(f.name in LACKS[target] for f in pair)


PAIRS = list(itertools.combinations_with_replacement(FEATURES, 2))
LACKS = {"sm100": (), "sm90": ("pairs of CTAs", "dynamic")}
SAMPLE = [
    pytest.param(target, pair, id=f"{target}: {name(pair)}")
    for target, chosen in (("sm100", PAIRS[::244]), ("sm90", PAIRS[31::541]))
    for pair in chosen
    if together(*pair) is not None and not lacks(target, pair)
]


@pytest.mark.parametrize("target, pair", SAMPLE)
def test_cells_run(target: str, pair: Pair) -> None:
    cell = execute(*pair, target)
    assert cell.outcome == "runs", cell.why


@pytest.mark.sweep
@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("target", LACKS)
@pytest.mark.parametrize("pair", PAIRS, ids=map(name, PAIRS))
def test_every_cell(pair: Pair, target: str, seed: int) -> None:
    cell = execute(*pair, target, seed)
    assert cell.outcome != "refused" or len(cell.why) > 20, "a refusal says why"
    assert cell.outcome != "runs" or not lacks(target, pair)


def test_the_page_has_every_cell_and_a_reason_for_every_refusal() -> None:
    page = (Path(__file__).parents[2] / "docs" / "composition.md").read_text()
    rows: dict[str, list[str]] = {}
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| |"):
            feature, *entries = (entry.strip() for entry in line.strip("| ").split("|"))
            rows.setdefault(feature, []).extend(entries)
    names = [feature.name for feature in FEATURES]
    assert list(rows) == names
    reasons = dict(re.findall(r"^(\d+)\. (.{20,})$", page, re.MULTILINE))
    accepted = {"✓", "·", *(f"[{number}]" for number in reasons)}
    for name, entries in rows.items():
        assert len(entries) == len(names), name
        assert set(entries) <= accepted, name
