"""Compilations are counted: what changes at run time compiles nothing, a second process neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Problem, Variant, attention
from fa4core.compile import disk, export, load, statistics
from primitives import mask, score, sequence


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def qkv(batch: int, rows: int, columns: int, heads: int = 2) -> list[torch.Tensor]:
    shapes = ((batch, rows, heads, 64), (batch, columns, heads, 64), (batch, columns, heads, 64))
    return [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]


def variant(window: int, table: torch.Tensor) -> Variant:
    return Variant(mask=mask.causal() & mask.sliding_window(window), score=score.dense_bias(table))


def check(made: Variant, tensors: list[torch.Tensor], layout=None, **options) -> None:
    out = attention(*tensors, made, layout=layout, backend="emulator", **options)
    wanted = attention(*tensors, made, layout=layout, backend="reference", **options)
    torch.testing.assert_close(out.float(), wanted.float(), atol=0.03, rtol=0.03)


def test_what_changes_at_run_time_compiles_nothing() -> None:
    table = drawn(400, 400).float()
    check(variant(50, table), qkv(1, 200, 200))  # more than one query tile: another kernel below
    before = statistics().kernels
    check(variant(7, table), qkv(1, 200, 200))  # window
    check(variant(50, table), qkv(1, 200, 300))  # lengths, and with them the diagonal's offset
    check(variant(50, table), qkv(3, 133, 200, heads=4))  # batch and heads
    check(variant(50, drawn(500, 500, seed=9).float()), qkv(1, 200, 200))  # captured tensor
    check(variant(50, table.t()), qkv(1, 200, 200))  # its strides
    check(variant(50, table), qkv(1, 200, 200), scale=0.7)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(1, 200, 200)]
    check(variant(50, table), strided)
    used = sequence.fixed(seqused_k=torch.tensor([150]))
    check(variant(50, table), qkv(1, 200, 200), used)
    assert statistics().kernels == before


def test_packed_sequences_are_a_kernel_of_their_own_for_all_lengths() -> None:
    table, packed = drawn(400, 400).float(), [t[0] for t in qkv(1, 200, 200)]
    check(variant(50, table), packed, sequence.varlen(torch.tensor([0, 60, 200])))
    before = statistics().kernels
    for starts in ([0, 200], [0, 0, 130, 150, 200]):
        check(variant(50, table), packed, sequence.varlen(torch.tensor(starts)))
    assert statistics().kernels == before


def test_another_type_is_another_kernel() -> None:
    table = drawn(200, 200).float()
    check(variant(50, table), qkv(1, 200, 200))
    before = statistics().kernels
    check(variant(50, table.half()), qkv(1, 200, 200))
    assert statistics().kernels == before + 1


_PROCESS = """
import json, attrs, torch
from fa4core import Variant, attention
from fa4core.compile import statistics
from primitives import mask
q = torch.ones(1, 40, 2, 64).bfloat16()
window = mask.sliding_window({window})
out = attention(q, q, q, Variant(mask=mask.causal() & window), backend="emulator")
assert (out == 1).all()
print(json.dumps(attrs.asdict(statistics())))
"""


def process(folder: os.PathLike, window: int) -> dict[str, int]:
    """What the caches did in a process of its own."""
    return json.loads(run(_PROCESS.format(window=window), **{disk.VARIABLE: str(folder)}))


def run(program: str, **environment: str) -> str:
    """What a program prints in a process of its own."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_compiles_nothing(tmp_path) -> None:
    first = process(tmp_path, window=20)
    assert (first["compiled"], first["read"]) == (1, 0)
    second = process(tmp_path, window=3)
    assert (second["compiled"], second["read"]) == (0, 1)


def test_an_exported_variant_runs_without_the_compiler(tmp_path, monkeypatch) -> None:
    """In this process with a compiler that refuses, and other captured tensors and lengths."""
    from fa4core.compile import build, cache

    table = drawn(300, 300).float()
    problem = Problem(1, 2, 2, 64, 64, (200,), (200,))
    export(variant(50, table), problem, "sm100", tmp_path / "bias.fa4", emulated=True)

    def refuse(kernel: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(build, "build", refuse)
    monkeypatch.setenv(disk.VARIABLE, disk.OFF)
    cache.clear()
    attend, tensors = load(tmp_path / "bias.fa4"), qkv(2, 150, 180)
    wanted = attention(*tensors, variant(50, table), backend="reference", return_lse=True)
    for _ in range(2):
        out, lse = attend(*tensors, return_lse=True)
        torch.testing.assert_close(out.float(), wanted[0].float(), atol=0.03, rtol=0.03)
        torch.testing.assert_close(lse, wanted[1], atol=1e-3, rtol=1e-3)
    other = drawn(300, 300, seed=4).float()
    captured = [other if t.dim() == 2 else t for t in attend.arguments]
    replaced = load(tmp_path / "bias.fa4", captured=captured)
    wanted = attention(*tensors, variant(50, other), backend="reference")
    torch.testing.assert_close(replaced(*tensors).float(), wanted.float(), atol=0.03, rtol=0.03)
    with pytest.raises(AssertionError, match="compiled"):  # one query tile was not exported
        attend(*qkv(1, 20, 20))
    with pytest.raises(ValueError, match="the file takes"):
        load(tmp_path / "bias.fa4", captured=[other.half()])


def test_a_file_that_is_no_export_is_refused(tmp_path, monkeypatch) -> None:
    from fa4core.compile import aot

    (tmp_path / "text").write_text("no")
    with pytest.raises(ValueError, match="no file written by"):
        load(tmp_path / "text")
    with pytest.raises(ValueError, match="nothing to compile"):
        export(Variant(), Problem(1, 2, 2, 64, 64, (0,), (9,)), "sm100", tmp_path / "none")
    with pytest.raises(NotImplementedError, match="float32"):
        single = Problem(1, 2, 2, 64, 64, (9,), (9,), dtype=torch.float32)
        export(Variant(), single, "sm100", tmp_path / "none")
    with pytest.raises(ValueError, match="sm100 and sm103"):
        export(Variant(), Problem(1, 2, 2, 64, 64, (9,), (9,)), "sm90", tmp_path / "none")
    problem = Problem(1, 2, 2, 64, 64, (40,), (40,))
    export(Variant(mask=mask.causal()), problem, "sm100", tmp_path / "old", emulated=True)
    monkeypatch.setattr(aot, "sources", lambda: "a later version")
    with pytest.raises(ValueError, match="another version of this project"):
        load(tmp_path / "old")


def test_a_kernel_for_a_gpu_is_made_and_linked_without_one(tmp_path) -> None:
    """Its host code is a library that opens without the DSL; launching it needs the GPU."""
    problem = Problem(1, 2, 2, 64, 64, (40,), (40,))
    export(Variant(mask=mask.causal()), problem, "sm100", tmp_path / "causal.fa4")
    program = (
        "import sys; from fa4core.compile import load, cache\n"
        f"attend = load({str(tmp_path / 'causal.fa4')!r})\n"
        "(package,) = cache._packages.values()\n"
        "assert package.artifact.kernels and callable(package.function)\n"
        "assert 'cutlass' not in sys.modules, 'the compiler was imported'\n"
    )
    run(program)
