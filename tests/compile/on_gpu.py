"""The way to a GPU, on any that is there: `python tests/compile/on_gpu.py build|check FOLDER`.

`build` needs the compiler and no GPU; it writes `scaling`'s kernel for Hopper. `check` needs a
Hopper GPU and no compiler: it runs that kernel through `attention`'s prepared calls and checks
values, devices, streams and graphs, and measures the host's time of a call.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import attrs
import torch

from fa4core import Problem, Variant, attention, dispatch, recall
from fa4core.compile import cache
from fa4core.compile.package import Package
from fa4core.places import Place
from fa4core.prepared import Skeleton, kernel_of
from primitives import score

TARGET = "sm90"


def run_time(call, spec, place, metadata) -> tuple:
    """As of the real kernels: a table, captured tensors, the scale, the number of CTAs."""
    captured = tuple(c.tensor.detach() for c in call.program.graph.captures)
    return torch.full((1, 4), 3, dtype=torch.int32), captured, float(call.scale), 1


@attrs.frozen
class Nothing:
    """The kernel is compiled for nothing in particular."""


def skeleton() -> Skeleton:
    return Skeleton(
        spec_of=lambda call, target: Nothing(),
        function=lambda spec: "scaling:scaling",
        workspaces=lambda call, spec, out, rows: (),
        metadata=lambda call, spec, place, device: None,
        before=lambda call, place: (),
        run_time=run_time,
    )


def variant(device: str) -> Variant:
    return Variant(score=score.alibi(torch.tensor([1.0, 2.0], device=device)))


def build(folder: Path) -> None:
    from fa4core.compile.build import build as compiled

    problem = Problem(1, 2, 2, 64, 64, (8,), (8,))
    call = dispatch.analysed(variant("cpu").program, problem, None, 0.5)
    kernel, _ = kernel_of(skeleton(), call, Place(TARGET, 1, False))
    assert kernel is not None
    (folder / "scaling.zip").write_bytes(compiled(kernel).to_bytes())


def through_attention(folder: Path) -> None:
    """Make `backend="sm100"` mean this kernel, on any GPU."""
    cache.add(Package.from_bytes((folder / "scaling.zip").read_bytes()))
    dispatch.SKELETONS["sm100"] = skeleton()
    dispatch.choose = lambda *_: ("sm100", "asked for")
    dispatch.check = lambda *_: None
    dispatch.target_of = lambda device: TARGET


def tensors(device: str, packed: bool = False) -> list[torch.Tensor]:
    made = [torch.randn(1, 8, 2, 64, device=device).bfloat16() for _ in range(3)]
    return [t[0] for t in made] if packed else made


def run(given: list[torch.Tensor], made: Variant) -> tuple[torch.Tensor, ...]:
    return attention(*given, made, scale=0.5, return_lse=True, return_row_max=True, backend="sm100")


def check_values(device: str) -> None:
    given, made = tensors(device), variant(device)
    for _ in range(2):
        out, lse, row_max = run(given, made)
        torch.testing.assert_close(out, (given[2].float() * 0.5 + 3).bfloat16())
        assert out.device == given[0].device and (row_max == 0.5).all()
        assert (lse[0, 0] == 1).all() and (lse[0, 1] == 2).all()
    print(f"values on {device}, current device {torch.cuda.current_device()}: right")


def check_stream(device: str) -> None:
    """What the current stream does before the call happens before it, on this stream only."""
    given, made = tensors(device), variant(device)
    run(given, made)
    given[2].fill_(1)  # loads the kernels, which may wait for the GPU
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        given[2].fill_(8)
        out, _, _ = run(given, made)
        early = side.query()
    torch.cuda.synchronize()
    assert not early, "the call waited for the GPU, so nothing is shown"
    assert (out == 7).all(), "the kernel ran on another stream"
    print("stream: the current one")


def check_graph(device: str) -> None:
    given, made = tensors(device), variant(device)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run(given, made)
        raise AssertionError("a call was prepared during a capture")
    except RuntimeError as error:
        assert "before the capture" in str(error), error
    run(given, made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, _ = run(given, made)
    del made  # the graph goes on reading the call's tables
    for value in (2.0, 6.0):
        given[2].fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (out == value / 2 + 3).all()
    print("graph: captured and replayed")


def measure(device: str) -> None:
    """Host time of a call, everything in it; then with a launch that does nothing."""
    import tvm_ffi
    import tvm_ffi.testing

    made, idle = variant(device), variant(device)
    given = tensors(device)
    run(given, made)
    original, nothing = dispatch.on_device, tvm_ffi.get_global_func("testing.nop")
    dispatch.on_device = lambda *where: attrs.evolve(original(*where), launcher=lambda f: nothing)
    run(given, idle)
    calls = {
        "output": lambda: attention(*given, made, scale=0.5, backend="sm100"),
        "output, without the launch": lambda: attention(*given, idle, scale=0.5, backend="sm100"),
        "output, LSE and row maximum, without the launch": lambda: run(given, idle),
        "output, LSE and row maximum": lambda: run(given, made),
        "three results allocated on the GPU": lambda: [
            torch.empty(s, dtype=torch.float32, device=device) for s in (512, 16, 16)
        ],
        "key": lambda: recall.key_of(*given, recall.PADDED, 0.5, "sm100"),
        "is a graph captured?": torch.cuda.is_current_stream_capturing,
    }
    for name, call in calls.items():
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) / 100 * 1e6)
        low, middle, high = statistics.quantiles(times, n=4)
        print(f"{name}: {middle:.2f} us a call (quartiles {low:.2f} to {high:.2f})")


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "build":
        build(folder)
        return
    through_attention(folder)
    for i in range(torch.cuda.device_count()):
        check_values(f"cuda:{i}")
        check_stream(f"cuda:{i}")
    check_graph("cuda:0")
    assert "cutlass" not in sys.modules
    with torch.no_grad():
        measure("cuda:0")


if __name__ == "__main__":
    main()
