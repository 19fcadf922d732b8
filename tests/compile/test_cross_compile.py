"""Compiling for named targets on a machine without a GPU, and reading what came out."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.compile import TARGETS, cross_compile, import_dsl, resolve
from fa4core.compile.tools import ToolMissing, find_tool

import_dsl()

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402


@cute.kernel
def _scale_kernel(a: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    c[thread] = cute.math.exp2(a[thread], fastmath=True)


@cute.jit
def scale(a: cute.Tensor, c: cute.Tensor):
    _scale_kernel(a, c).launch(grid=[1, 1, 1], block=[128, 1, 1])


def compile_for(target: str):
    fake = make_fake_compact_tensor(cutlass.Float32, (128,), assumed_align=16)
    return cross_compile(scale, fake, fake, target=target)


def have(tool: str) -> bool:
    try:
        find_tool(tool)
    except ToolMissing:
        return False
    return True


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_ptx_is_for_the_target(target: str):
    artifact = compile_for(target).artifact
    assert f".target {TARGETS[target].arch}" in artifact.ptx
    assert artifact.cubin.startswith(b"\x7fELF")
    (kernel,) = artifact.kernels
    assert "_scale_kernel" in kernel


def test_one_process_compiles_for_several_targets():
    first, second = compile_for("sm100").artifact, compile_for("sm90").artifact
    assert first.target.arch == "sm_100a" and second.target.arch == "sm_90a"
    assert first.cubin != second.cubin


def test_the_command_line_is_hidden_from_the_dsl(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["program", "-h", "-diagnostic", "nonsense"])
    assert compile_for("sm100").artifact.ptx
    assert sys.argv[1] == "-h"


@pytest.mark.parametrize("name", ["SM100", "sm_100a", "sm100"])
def test_target_names(name: str):
    assert resolve(name).name == "sm100"


@pytest.mark.parametrize("name", ["sm75", None, 103])
def test_unknown_target_names_the_known_ones(name):
    with pytest.raises(ValueError, match="sm100"):
        resolve(name)


@pytest.mark.skipif(not have("cuobjdump"), reason="cuobjdump is not installed")
def test_resources():
    artifact = compile_for("sm100").artifact
    resources = artifact.resources()[artifact.kernels[0]]
    assert 0 < resources.registers <= 64
    assert not resources.spills


@pytest.mark.skipif(not have("nvdisasm"), reason="nvdisasm is not installed")
def test_sass_statistics():
    artifact = compile_for("sm100").artifact
    statistics = artifact.sass_statistics()[artifact.kernels[0]]
    assert statistics.instructions["MUFU"] == 1
    assert statistics.modifiers["MUFU.EX2"] == 1
    assert statistics.total >= 8


def test_a_missing_tool_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fa4core.compile.tools._candidates", lambda name: [])
    find_tool.cache_clear()
    try:
        with pytest.raises(ToolMissing, match="pip install nvidia-cuda-nvdisasm"):
            find_tool("nvdisasm")
    finally:
        find_tool.cache_clear()
