"""How long the first call of a variant takes on this machine's GPU, in a process of its own.

    python benchmarks/first_call.py

Once with an empty disk cache, where the kernel is compiled, and once with the one that this filled.
Imports and CUDA's start are outside the times. The first is that of making the variant, which
imports torch's tracer, the second that of `attention` until its result is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {
    "full": "Variant()",
    "causal": "Variant(mask=mask.causal())",
    "ALiBi": "Variant(mask=mask.causal(), score=score.alibi(torch.ones(8, device='cuda')))",
    "softcap": "Variant(mask=mask.causal(), score=score.softcap(30.0))",
}


def timed(source: str) -> tuple[float, float]:
    """Seconds of the first variant and of the first call in this process."""
    sys.path.insert(0, str(ROOT))
    import torch

    from fa4core import Variant, attention
    from fa4core.plan.target import of_capability
    from primitives import mask, score

    assert torch.cuda.is_available(), "first_call.py needs a GPU"
    target = of_capability(*torch.cuda.get_device_capability())

    q, k, v = (torch.randn(1, 1024, 8, 128, device="cuda").bfloat16() for _ in range(3))
    attention(q[:, :0], k, v, backend="reference")
    torch.cuda.synchronize()
    names = {"Variant": Variant, "mask": mask, "score": score, "torch": torch}
    start = time.perf_counter()
    variant = eval(source, names)
    made = time.perf_counter()
    attention(q, k, v, variant, backend=target.name)
    torch.cuda.synchronize()
    return made - start, time.perf_counter() - made


@click.command()
@click.option("--variants", default=",".join(VARIANTS), help="Comma-separated.")
@click.option("--one", hidden=True, help="Source of the variant to time here.")
def main(variants: str, one: str | None) -> None:
    """Print seconds by variant."""
    if one is not None:
        print(*timed(one))
        return
    for name, source in ((name, VARIANTS[name]) for name in variants.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"FA4CORE_CACHE_DIR": folder}
            command = [sys.executable, __file__, "--one", source]
            runs = [
                subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                for _ in range(2)
            ]
        (made, cold), (_, warm) = (map(float, run.stdout.split()[-2:]) for run in runs)
        print(f"{name}: variant {made:.2f} s, call {cold:.2f} s, from the disk cache {warm:.2f} s")


if __name__ == "__main__":
    main()
