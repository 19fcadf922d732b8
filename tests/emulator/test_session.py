"""The `emulator` block: ways to call a kernel, memory across launches, errors, replay."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import torch
from kernels import elementwise
from kernels.case import view
from rules import applied, drop, edit

from fa4core.compile import import_dsl
from fa4core.emulator.launch import EmulatorError
from fa4core.emulator.session import compile_for_emulator, emulator

import_dsl()

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402


@pytest.fixture(scope="module")
def add_ffi():
    """Compiled before any session, called with torch tensors; its length is a run-time value."""
    length = cute.sym_int()
    fake = [make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=16) for _ in "abc"]
    return compile_for_emulator(elementwise.add, *fake, options="--enable-tvm-ffi")


def test_tvm_ffi_form_takes_torch_tensors(add_ffi):
    a, b = torch.randn(300), torch.randn(300)
    with emulator(seed=1) as session:
        c = torch.empty(300)
        add_ffi(a, b, c)
        add_ffi(c, b, c)
    assert torch.equal(c, a + b + b)
    assert len(session.launches) == len(session.statistics) == 2
    launch = session.launches[0]
    assert launch.grid == (3, 1, 1) and launch.block == (128, 1, 1)
    assert launch.name == "_add_kernel"


def test_plain_form_and_direct_call():
    a, b = torch.randn(130), torch.randn(130)
    with emulator() as session:
        c, d = torch.empty(130), torch.empty(130)
        compiled = cute.compile(elementwise.add, view(a), view(b), view(c))
        compiled(view(a), view(b), view(c))
        elementwise.add(view(a), view(b), view(d))
    assert torch.equal(c, a + b) and torch.equal(d, a + b)
    assert len(session.launches) == 2


def test_reading_what_nobody_wrote_is_reported(add_ffi):
    with emulator(), pytest.raises(EmulatorError) as caught:
        unwritten = torch.empty(300)
        add_ffi(unwritten, torch.randn(300), torch.empty(300))
    assert caught.value.reports[0].kind == "uninitialised"


def test_memory_that_torch_wrote_counts_as_written(add_ffi):
    with emulator():
        a = torch.empty(300)
        a.normal_()
        c = torch.empty(300)
        add_ffi(a, a, c)
        add_ffi(c, a, c)  # and so does what a kernel wrote
    assert torch.equal(c, a + a + a)


def test_out_of_bounds_is_reported(add_ffi):
    with emulator() as session, pytest.raises(EmulatorError) as caught:
        session.transform(applied(edit(r"setp\.le\.s32", "le", "lt")))
        add_ffi(torch.randn(300), torch.randn(300), torch.empty(300))
    report = caught.value.reports[0]
    assert report.kind == "bounds"
    assert "ld.global" in report.ptx or "st.global" in report.ptx


def test_error_does_not_end_the_session(add_ffi):
    a = torch.randn(300)
    with emulator(detect="all") as session:
        with pytest.raises(EmulatorError):
            add_ffi(torch.empty(300), a, torch.empty(300))
        c = torch.empty(300)
        add_ffi(a, a, c)
    assert torch.equal(c, a + a)
    assert len(session.launches) == 2


def test_replay_repeats_the_session(add_ffi):
    a, b = torch.randn(300), torch.randn(300)
    with emulator(seed=3) as session:
        c = torch.empty(300)
        add_ffi(a, b, c)
        a.mul_(2)
        add_ffi(a, c, c)
    wanted = c.clone()
    c.zero_()
    again = session.replay()
    assert torch.equal(c, wanted)
    assert dict(again[-1].instructions) == dict(session.statistics[-1].instructions)
    session.replay(seed=99)
    assert torch.equal(c, wanted)


def test_sessions_do_not_nest():
    with emulator(), pytest.raises(RuntimeError, match="nest"), emulator():
        pass


def test_everything_is_put_back(add_ffi):
    with emulator():
        assert torch.zeros(1).is_cuda
    tensor = torch.zeros(1)
    assert not tensor.is_cuda and tensor.__dlpack_device__()[0] == 1
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    with pytest.raises(ValueError, match="device_type"):
        add_ffi(tensor, tensor, tensor)


def test_statistics_count(add_ffi):
    with emulator() as session:
        add_ffi(torch.randn(300), torch.randn(300), torch.empty(300))
    (statistics,) = session.statistics
    # three CTAs of four warps, of which ten have work: 300 elements
    assert sum(n for op, n in statistics.instructions.items() if op.startswith("add.f32")) == 10
    assert statistics.bytes["global.read"] == 2 * 300 * 4
    assert statistics.bytes["global.write"] == 300 * 4


def test_a_mutation_that_changes_nothing_fails():
    with pytest.raises(AssertionError):
        drop(r"no\.such\.instruction")("add.f32 %r1, %r2, %r3;")
