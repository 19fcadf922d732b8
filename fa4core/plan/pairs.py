"""Whether two CTAs share a work tile of Blackwell's backward pass unless the variant says: data.

Modelled TFLOP/s of our kernels with one CTA and with two, and the ratio of their times, in 3 seeds
(`python benchmarks/backward_model.py --pairs`; 32,768 tokens, hidden size 2048):

| head dim | variant | 4k | 8k | 16k |
|---|---|---|---|---|
| 64 | full | 1007, 918, 1.10 | 1050, 961, 1.09 | 1073, 983, 1.09 |
| 64 | causal | 913, 788, 1.16 | 1001, 882, 1.13 | 1051, 938, 1.12 |
| 128 | full | 1185, 1335, 0.89 | 1231, 1405, 0.88 | 1255, 1442, 0.87 |
| 128 | causal | 1076, 1154, 0.93 | 1171, 1297, 0.90 | 1224, 1384, 0.88 |

A pair wins where shared memory binds and lists of queries are long, and loses with windows (1.02 of
1024 keys, 1.24 of 128, at 8k). Lengths and widths are not compiled in, so they don't decide: what
always wins at these lengths is paired. `plan` and the SM100 backward ask; it knows no kernels.
"""

from __future__ import annotations

from primitives import mask, score
from primitives.expr import Node

TARGETS = ("sm100", "sm103")
HEAD_DIM = 128
_MASKS = (mask.full(), mask.causal(), mask.causal(align="top_left"))
PAIRED = frozenset(m.expr for m in _MASKS)


def backward_ctas(target: str, of_mask: Node, of_score: Node, head_dims: tuple[int, int]) -> int:
    """CTAs that share a work tile of a variant without a schedule; functions are expressions."""
    paired = target in TARGETS and of_mask in PAIRED and of_score == score.identity().expr
    return 2 if paired and head_dims == (HEAD_DIM, HEAD_DIM) else 1
