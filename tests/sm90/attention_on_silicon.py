"""Compares attention by the Hopper kernels in the emulator with the same calls on a Hopper GPU.

    python tests/sm90/attention_on_silicon.py run results.pt       # with an H100 or H200
    python tests/sm90/attention_on_silicon.py compare results.pt   # anywhere

Outputs, statistics and deterministic gradients of the testing kit's cases. A difference is given
relative to the largest element: what approximate instructions may do is below the rounding of the
16-bit results (2^-9 for bfloat16, 2^-12 for float16), and some 1e-6 for float32 ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from hopper_gpu import on_gpu

from fa4core.emulator.session import emulator
from fa4core.ops import differentiated
from fa4core.testing import Case, LayoutSpec, Shape

Tensors = dict[str, torch.Tensor]
FIELDS = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table", "max_seqlen_q",
    "max_seqlen_k",
)  # fmt: skip

RAGGED, PACKED = Shape((300,), (290,), 2, 1, 64, 64), Shape((130, 0, 260), (300, 100, 1), 2, 2)
VARLEN = LayoutSpec("varlen")
CASES = (
    Case("Variant()", RAGGED, dtype="bfloat16"),
    Case("Variant(mask=mask.causal())", Shape((512,), (512,), 2, 1, 128, 128), dtype="bfloat16"),
    Case("Variant(mask=mask.causal())", Shape((200,), (300,), 2, 2, 192, 128), dtype="float16"),
    Case("Variant(mask=mask.causal())", Shape((150,), (200,), 2, 1, 256, 256), dtype="bfloat16"),
    Case("Variant(mask=mask.sliding_window(90, 20))", PACKED, VARLEN, dtype="float16"),
    Case(
        "Variant(mask=mask.causal(), score=score.alibi(normal(1, 2, std=0.2)))",
        PACKED,
        VARLEN,
        dtype="bfloat16",
    ),
    Case("Variant(mask=mask.causal(), score=score.softcap(3.0))", RAGGED, dtype="bfloat16"),
    Case("Variant(score=score.dense_bias(normal(2, 300, 300)))", RAGGED, dtype="float16"),
    Case(
        "Variant(mask=mask.sliding_window(50), sink=sink.learned(normal(1, 2)))",
        RAGGED,
        dtype="bfloat16",
        contents="outliers",
    ),
)


def results(case: Case, backend: str) -> Tensors:
    """Output, LSE, row maximum and gradients, on the CPU."""
    inputs = case.inputs()
    there = on_gpu if backend == "sm90" else lambda given: given
    given = [inputs.q, inputs.k, inputs.v, inputs.grad_out, inputs.grad_lse]
    q, k, v, grad_out, grad_lse = (there(t.detach()) for t in given)
    captured = [t.detach() for t in inputs.variant.arguments]
    layout = [None if inputs.layout is None else getattr(inputs.layout, n) for n in FIELDS]
    spec = inputs.variant.spec
    rest = (*map(there, (captured, *layout)), spec, None, backend)
    out, lse, row_max = torch.ops.fa4core.forward(q, k, v, *rest, True)
    *grads, of_captured = torch.ops.fa4core.backward(
        grad_out, grad_lse, q, k, v, out, lse, *rest, True
    )
    names = ("out", "lse", "row_max", "dq", "dk", "dv")
    found = dict(zip(names, (out, lse, row_max, *grads), strict=True))
    found |= {f"d{s}": t for s, t in zip(differentiated(spec), of_captured, strict=True)}
    return {name: tensor.cpu() for name, tensor in found.items()}


@click.group()
def main() -> None:
    """See the module."""


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
def run(path: Path) -> None:
    """Run on this machine's GPU and save the results."""
    torch.save([results(case, "sm90") for case in CASES], path)
    click.echo(f"{len(CASES)} cases, {torch.cuda.get_device_name()}")


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def compare(path: Path) -> None:
    """Run in the emulator and compare with saved results."""
    for case, saved in zip(CASES, torch.load(path), strict=True):
        with emulator("sm90", num_sms=2, record=False):
            emulated = results(case, "emulator")
        click.echo(f"{case.variant}  {case.shape}  {case.dtype}")
        for name, here in emulated.items():
            click.echo(f"    {name:8} {_difference(here.double(), saved[name].double())}")


def _difference(here: torch.Tensor, there: torch.Tensor) -> str:
    """In words; what is not finite has to be the same."""
    if torch.equal(here.nan_to_num(), there.nan_to_num()):
        return "same bits"
    numbers = there.isfinite()
    if not torch.equal(here[~numbers].nan_to_num(), there[~numbers].nan_to_num()):
        return "other infinities"
    apart, largest = (here - there)[numbers].abs(), there[numbers].abs().max().clamp_min(1e-30)
    part = (apart > 0).double().mean()
    return f"{apart.max() / largest:.1e} of the largest, {part:.1%} differ"


if __name__ == "__main__":
    main()
