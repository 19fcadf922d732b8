"""Where calls run: which GPU a backend takes, and that places and skeletons know no kernel."""

from __future__ import annotations

import pytest
import torch

from fa4core import Problem, Variant, backends, dispatch
from fa4core.backends import choose, supports

GPU = torch.device("cuda", 0)
PROBLEM = Problem(1, 2, 2, 64, 64, (200,), (200,))


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU of some compute capability."""

    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")

    return pretend


@pytest.mark.parametrize(("capability", "target"), [((10, 0), "sm100"), ((10, 3), "sm103")])
def test_blackwell_takes_its_kernels(gpu, capability, target) -> None:
    gpu(*capability)
    for backend in ("auto", "sm100"):
        assert choose(backend, GPU, Variant().program, PROBLEM)[0] == "sm100"
    assert backends.target_of(GPU) == target
    answer = supports(Variant(), PROBLEM, device=GPU)
    assert answer and answer.reason == "sm100: the tensors are on cuda:0, a Some GPU"


def test_auto_says_why_blackwell_takes_the_reference(gpu) -> None:
    gpu(10, 0)
    single = Problem(1, 2, 2, 64, 64, (200,), (200,), dtype=torch.float32)
    chosen, why = choose("auto", GPU, Variant().program, single)
    assert chosen == "reference" and "SM100 kernels refuse the call" in why and "float32" in why
    with pytest.raises(NotImplementedError, match=r"backend='sm100'.*float32"):
        dispatch.check(Variant().program, single, GPU, "sm100")


@pytest.mark.parametrize(
    "capability, automatic", [((9, 0), "sm90"), ((12, 0), "reference")], ids=str
)
def test_other_gpus_are_refused_by_name(gpu, capability, automatic) -> None:
    gpu(*capability)
    found = ".".join(map(str, capability))
    with pytest.raises(NotImplementedError, match=f"Some GPU of capability {found}.*emulator"):
        choose("sm100", GPU)
    assert choose("auto", GPU, Variant().program, PROBLEM)[0] == automatic


def test_a_machine_without_gpu_names_the_emulator() -> None:
    for device in ("cpu", "cuda"):
        with pytest.raises(NotImplementedError, match=r"needs a Blackwell GPU.*'emulator'"):
            choose("sm100", torch.device(device))


def test_another_skeleton_on_another_target_needs_only_itself() -> None:
    """A kernel that is no attention, for Hopper, through the same prepared call."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from on_gpu import TARGET, skeleton, variant

    from fa4core.places import in_emulator
    from fa4core.prepared import prepare

    problem = Problem(2, 2, 2, 64, 64, (8, 5), (8, 5))
    call = dispatch.analysed(variant("cpu").program, problem, None, 0.5)
    q, k, v = (torch.randn(2, 8, 2, 64).bfloat16() for _ in range(3))
    ready = prepare(skeleton(), call, q, k, v, in_emulator(TARGET))
    for value in (v, -v):
        out, lse, row_max = ready(q, k, value)
        torch.testing.assert_close(out, (value.float() * 0.5 + 3).bfloat16())
        assert (lse[:, 0] == 1).all() and (lse[:, 1] == 2).all() and (row_max == 0.5).all()
