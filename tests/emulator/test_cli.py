"""`emulate` runs a script that says device="cuda"."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from click.testing import CliRunner

from fa4core.emulator.cli import emulate

SCRIPT = """
import argparse
import torch
import cutlass
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def double_kernel(a: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    c[thread] = a[thread] * 2.0

@cute.jit
def double(a: cute.Tensor, c: cute.Tensor):
    double_kernel(a, c).launch(grid=[1, 1, 1], block=[cute.size(a), 1, 1])

parser = argparse.ArgumentParser()
parser.add_argument("-n", type=int)
n = parser.parse_args().n
assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)
a = torch.randn(n, device="cuda")
c = torch.empty_like(a)
assert a.is_cuda and c.device == torch.device("cuda", 0)
double(from_dlpack(a), from_dlpack(c))
torch.cuda.synchronize()
torch.testing.assert_close(c, 2 * a)
print("max", c.cpu().abs().max().item() > 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_script_runs_unchanged(script: Path):
    result = CliRunner().invoke(emulate, ["--seed", "5", str(script), "-n", "64"])
    assert result.exit_code == 0, result.output
    assert "max True" in result.output


def test_findings_are_an_error_with_the_place(script: Path):
    script.write_text(script.read_text().replace("c[thread] =", "c[thread + 1] ="))
    result = CliRunner().invoke(emulate, [str(script), "-n", "64"])
    assert result.exit_code != 0
    assert "bounds" in result.output
    assert "script.py:" in result.output  # the source line of the store
