"""A random mask that any position can be asked for: a counter-based hash, no stored state."""

from __future__ import annotations

import torch

from primitives.mask.core import Mask, named
from primitives.scalar import parameter

#: The hash's values are below this.
RANGE = 1 << 30
#: Odd multipliers below 2^15, one a round: a product with 16 bits stays below 2^31, so that the
#: hash is the same in 32-bit and in exact arithmetic.
_MULTIPLIERS = (0x6A09, 0x7B67, 0x5E6F, 0x4F53)
_LOW = 0xFFFF


def random(keep: float, seed: int | torch.Tensor = 0) -> Mask:
    """Attends to each key with probability `keep`, independently for every (b, h, q, k).

    The same seed gives the same mask on every backend, and each element can be computed by itself
    (a keyed Feistel network over the indices, in the manner of counter-based generators: Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). It is a test pattern or a
    structured dropout of keys, not a source of cryptographic or statistical-grade randomness.

    Args:
        keep: Probability in [0, 1], in steps of 2^-30; run-time.
        seed: An int from 0 to 2^32 - 1, or a 0-d integer tensor; run-time.

    Raises:
        ValueError, TypeError: A probability or a seed outside the range.
    """
    if not 0.0 <= keep <= 1.0:
        raise ValueError(f"keep={keep}; a probability between 0 and 1 is accepted")
    if isinstance(seed, torch.Tensor):
        if seed.dim() or seed.dtype.is_floating_point or seed.dtype == torch.bool:
            raise TypeError(
                f"seed is {seed.dtype} of shape {tuple(seed.shape)}; an int or a 0-d integer "
                "tensor is accepted"
            )
    elif not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 32:
        raise ValueError(f"seed={seed!r}; an int from 0 to 2^32 - 1 is accepted")
    key, threshold = parameter(seed), parameter(round(keep * RANGE))

    def random_mask(b, h, q_idx, kv_idx):
        return hashed(key, b, h, q_idx, kv_idx) < threshold

    return named(f"random({keep})", random_mask)


def hashed(seed, b, h, q_idx, kv_idx):
    """A number in [0, 2^30) for each (b, h, q, k); indices count modulo 2^32, heads modulo 2^16."""
    state = _absorb((0, 0), seed & _LOW, seed >> 16 & _LOW)
    state = _absorb(state, b & _LOW, h & _LOW)
    state = _absorb(state, q_idx & _LOW, q_idx >> 16 & _LOW)
    left, right = _absorb(state, kv_idx & _LOW, kv_idx >> 16 & _LOW)
    return left * (1 << 14) + (right >> 2)


def _absorb(state, low, high):
    """Mix a word into both halves, then a Feistel round for every multiplier."""
    left, right = state[0] ^ low, state[1] ^ high
    for number, multiplier in enumerate(_MULTIPLIERS):
        mixed = (right + 0x9E37 * (number + 1) & _LOW) * multiplier
        left, right = right, left ^ (mixed >> 9 ^ mixed) & _LOW
    return left, right
