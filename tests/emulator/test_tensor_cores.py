"""Tensor-core sums: what an H200 computed, in the emulator and in the plain model.

`h200_tensor_cores.npz` holds, for each instruction and each of the eight kinds of operands of
`kernels.tensor_cores`, two rows of A, four of B, and two by four of C and the H200's D, as words: a
small part of what `on_silicon.py run` saves, chosen where a bit more or less would show.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import torch
from kernels.case import Case, run
from kernels.tensor_cores import CASES, COLUMNS, ROWS, WORDS

KINDS, SOME_ROWS, SOME_COLUMNS = 8, 2, 4


def recorded(case: Case) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Inputs (zero where nothing is recorded) and the H200's words for them."""
    width = case.outputs()[0].shape[2]  # words of a row of C
    shapes = (
        (SOME_ROWS, WORDS), (SOME_COLUMNS, WORDS),
        *[(SOME_ROWS, width * SOME_COLUMNS // COLUMNS)] * 2,
    )  # fmt: skip
    with np.load(Path(__file__).parent / "h200_tensor_cores.npz") as file:
        words = torch.from_numpy(file[case.name.removesuffix(" bits sm90")])
    parts = [
        part.reshape(KINDS, *shape)
        for part, shape in zip(words.split([m * n for m, n in shapes], dim=1), shapes, strict=True)
    ]
    inputs = [torch.zeros(KINDS, rows, n, dtype=torch.int32)
              for rows, n in ((ROWS, WORDS), (COLUMNS, WORDS), (ROWS, width))]  # fmt: skip
    for whole, part in zip(inputs, parts, strict=False):
        whole[:, : part.shape[1], : part.shape[2]] = part
    return tuple(inputs), parts[3]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_model_gives_the_bits_of_an_h200(case: Case):
    inputs, words = recorded(case)
    (d,) = case.expected(*inputs)
    assert torch.equal(d[:, :SOME_ROWS, : words.shape[2]], words)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulator_gives_the_bits_of_an_h200(case: Case):
    inputs, words = recorded(case)
    outputs = tuple(x[:KINDS] for x in case.outputs())
    small = attrs.evolve(case, inputs=lambda: inputs, outputs=lambda: outputs)
    _, (d,), _ = run(small)
    assert torch.equal(d[:, :SOME_ROWS, : words.shape[2]], words)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("more", [-1, 1])
def test_recorded_sums_are_not_those_of_another_width(case: Case, more: int):
    inputs, words = recorded(case)
    forms, rule = case.expected.args
    (d,) = case.expected.func(forms, attrs.evolve(rule, kept=rule.kept + more), *inputs)
    assert not torch.equal(d[:, :SOME_ROWS, : words.shape[2]], words)
