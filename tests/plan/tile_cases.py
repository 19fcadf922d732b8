"""Masks as users of FlexAttention and attention-gym write them, each with a problem to try it on.

`brute_force` evaluates them element by element with torch's own `create_mask`: nothing of the
expression graph or of the analysis takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import numpy as np
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

MaskFunction = Callable[..., torch.Tensor]


@attrs.frozen(eq=False)
class Case:
    name: str
    mask: MaskFunction
    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads: int = 1

    def __str__(self) -> str:
        return self.name


def kinds_of(mask: torch.Tensor, tile_q: int, tile_k: int) -> np.ndarray:
    """0, 1, 2 for every tile of a dense (queries, keys) mask."""
    rows, columns = mask.shape
    tiles_q, tiles_k = -(-rows // tile_q), -(-columns // tile_k)
    padded = torch.zeros(tiles_q * tile_q, tiles_k * tile_k)
    padded[:rows, :columns] = mask.float()
    size = torch.zeros_like(padded)
    size[:rows, :columns] = 1
    total, true = (
        x.view(tiles_q, tile_q, tiles_k, tile_k).sum((1, 3)).numpy() for x in (size, padded)
    )
    return np.where(true == 0, 0, np.where(true == total, 2, 1)).astype(np.int8)


def brute_force(case: Case, tile_q: int, tile_k: int) -> np.ndarray:
    """The kinds as they are: int8 (batch, heads, query tiles, key tiles)."""
    dense = create_mask(
        case.mask, case.batch, case.heads, case.seqlen_q, case.seqlen_k, device="cpu"
    )
    return np.stack([np.stack([kinds_of(m, tile_q, tile_k) for m in row]) for row in dense])


# -------------------------------------------------------------------------------- building


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def lengths(total: int, count: int, seed: int) -> torch.Tensor:
    """Offsets of `count` documents of random lengths."""
    cuts = torch.randperm(total - 1, generator=torch.Generator().manual_seed(seed))[: count - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([total])])


def document_ids(offsets: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff()).int()


def random(shape: Iterable[int], share: float, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def sliding_window(size: int) -> MaskFunction:
    return and_masks(lambda b, h, q, k: q - k <= size, causal)


def local(mask: MaskFunction, offsets: torch.Tensor) -> MaskFunction:
    ids = document_ids(offsets)

    def inside(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx]
        return same & mask(b, h, q_idx - offsets[ids[q_idx]], kv_idx - offsets[ids[kv_idx]])

    return inside


def packed_causal(offsets: torch.Tensor) -> MaskFunction:
    ids = document_ids(offsets)
    return lambda b, h, q, k: (k >= offsets[ids[q]]) & causal(b, h, q, k)


def dilated(window: int, dilation: int) -> MaskFunction:
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= window) & ((distance % dilation) == 0)

    return mask


def block_diffusion(seq_len: int, block: int) -> MaskFunction:
    def mask(b, h, q_idx, kv_idx):
        q_noised, kv_noised = q_idx < seq_len, kv_idx < seq_len
        q_block, kv_block = (q_idx % seq_len) // block, (kv_idx % seq_len) // block
        diagonal = (q_block == kv_block) & (q_noised == kv_noised)
        offset = (q_block > kv_block) & q_noised & ~kv_noised
        clean = (q_block >= kv_block) & ~q_noised & ~kv_noised
        return diagonal | offset | clean

    return mask


def natten_1d(length: int, kernel: int) -> MaskFunction:
    def mask(b, h, q_idx, kv_idx):
        centre = q_idx.clamp(kernel // 2, length - 1 - kernel // 2)
        return (centre - kv_idx).abs() <= kernel // 2

    return mask


def natten_2d(width: int, height: int, kernel_w: int, kernel_h: int) -> MaskFunction:
    def mask(b, h, q_idx, kv_idx):
        q_y, q_x, kv_y, kv_x = q_idx // width, q_idx % width, kv_idx // width, kv_idx % width
        centre_x = q_x.clamp(kernel_w // 2, width - 1 - kernel_w // 2)
        centre_y = q_y.clamp(kernel_h // 2, height - 1 - kernel_h // 2)
        return ((centre_x - kv_x).abs() <= kernel_w // 2) & (
            (centre_y - kv_y).abs() <= kernel_h // 2
        )

    return mask


def natten_3d(size: tuple[int, int, int], kernel: tuple[int, int, int]) -> MaskFunction:
    def coordinates(index):
        return index // (size[1] * size[2]), index // size[2] % size[1], index % size[2]

    def mask(b, h, q_idx, kv_idx):
        result = q_idx >= 0
        for q, k, n, w in zip(coordinates(q_idx), coordinates(kv_idx), size, kernel, strict=True):
            centre = q.clamp(w // 2, n - 1 - w // 2)
            result = result & ((centre - k).abs() <= w // 2)
        return result

    return mask


def tiled_natten(width: int, height: int, kernel: int, tile: int) -> MaskFunction:
    def coordinates(index):
        number, inner = index // (tile * tile), index % (tile * tile)
        row, column = number // (width // tile), number % (width // tile)
        return column * tile + inner % tile, row * tile + inner // tile

    def mask(b, h, q_idx, kv_idx):
        (q_x, q_y), (kv_x, kv_y) = coordinates(q_idx), coordinates(kv_idx)
        centre_x = q_x.clamp(kernel // 2, width - 1 - kernel // 2)
        centre_y = q_y.clamp(kernel // 2, height - 1 - kernel // 2)
        return ((centre_x - kv_x).abs() <= kernel // 2) & ((centre_y - kv_y).abs() <= kernel // 2)

    return mask


def morton_natten(width: int, kernel: int) -> MaskFunction:
    def half(code):
        code = code & 0x55555555
        code = (code | (code >> 1)) & 0x33333333
        code = (code | (code >> 2)) & 0x0F0F0F0F
        code = (code | (code >> 4)) & 0x00FF00FF
        return (code | (code >> 8)) & 0x0000FFFF

    def mask(b, h, q_idx, kv_idx):
        low, high = kernel // 2, width - 1 - kernel // 2
        across = half(q_idx).clamp(low, high) - half(kv_idx)
        down = half(q_idx >> 1).clamp(low, high) - half(kv_idx >> 1)
        return (across.abs() <= kernel // 2) & (down.abs() <= kernel // 2)

    return mask


def sliding_tiles(canvas: int, kernel: int, tile: int, text: int) -> MaskFunction:
    """STA: windows of whole tiles, and text after the picture."""
    side, reach, vision = canvas // tile, kernel // tile // 2, canvas * canvas

    def mask(b, h, q_idx, kv_idx):
        q, k = q_idx // (tile * tile), kv_idx // (tile * tile)
        centre_y, centre_x = (
            (q // side).clamp(reach, side - 1 - reach),
            (q % side).clamp(reach, side - 1 - reach),
        )
        near = ((k // side - centre_y).abs() <= reach) & ((k % side - centre_x).abs() <= reach)
        picture = (q_idx < vision) & (kv_idx < vision)
        to_text = (q_idx < vision) & (kv_idx >= vision) & (kv_idx < vision + text)
        from_text = (q_idx >= vision) & (kv_idx < vision + text)
        return (picture & near) | to_text | from_text

    return mask


def flamingo(intervals: torch.Tensor, image_tokens: int) -> MaskFunction:
    image_of = torch.repeat_interleave(torch.arange(len(intervals)), image_tokens)

    def mask(b, h, q_idx, kv_idx):
        interval = intervals[image_of[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return mask


def tree(prefix: int, ancestors: torch.Tensor) -> MaskFunction:
    nodes = len(ancestors)

    def mask(b, h, q_idx, kv_idx):
        node = (kv_idx - prefix).clamp(min=0, max=nodes - 1)
        visible = (kv_idx >= prefix) & (kv_idx < prefix + nodes)
        return (kv_idx < prefix) | (visible & ancestors[q_idx, node])

    return mask


def draft_training(prefix: int, block: int) -> MaskFunction:
    def mask(b, h, q_idx, kv_idx):
        k = kv_idx - prefix
        own = (q_idx // block == k // block) & (k % block <= q_idx % block)
        return (kv_idx < prefix) | ((kv_idx >= prefix) & own)

    return mask


def shared_prefix(offsets: torch.Tensor, prefix_of: torch.Tensor) -> MaskFunction:
    ids = document_ids(offsets)

    def mask(b, h, q_idx, kv_idx):
        document = ids[q_idx]
        prefix = prefix_of[document]
        own = (kv_idx >= offsets[document]) & causal(b, h, q_idx, kv_idx)
        shared = (document != prefix) & (kv_idx >= offsets[prefix]) & (kv_idx < offsets[prefix + 1])
        return own | shared

    return mask


def top_k_tiles(chosen: torch.Tensor, tile: int) -> MaskFunction:
    """VSA: `chosen` (batch, heads, query tiles, k) lists key tiles."""

    def mask(b, h, q_idx, kv_idx):
        return (chosen[b, h, q_idx // tile] == (kv_idx // tile).unsqueeze(-1)).any(dim=-1)

    return mask


def batched(mask: MaskFunction, size: int) -> MaskFunction:
    return lambda b, h, q, k: (q // size == k // size) & mask(b, h, q % size, k % size)


def temporal_head(prompt: int, frame: int, width: int) -> MaskFunction:
    def mask(b, h, q_idx, kv_idx):
        near = torch.abs((q_idx - prompt) % frame - (kv_idx - prompt) % frame) < width
        return (kv_idx < prompt) | (q_idx < prompt) | near

    return mask


def chunked(size: int) -> MaskFunction:
    return and_masks(causal, lambda b, h, q, k: q // size == k // size)


def global_tokens(window: int, marked: torch.Tensor) -> MaskFunction:
    return or_masks(
        lambda b, h, q, k: (q - k).abs() <= window, lambda b, h, q, k: marked[q] | marked[k]
    )


def documents(ids: torch.Tensor) -> MaskFunction:
    return lambda b, h, q, k: ids[q] == ids[k]


def window_per_head(widths: torch.Tensor) -> MaskFunction:
    return lambda b, h, q, k: (q - k).abs() <= widths[h]


def prefix_per_batch(prefix: torch.Tensor) -> MaskFunction:
    return lambda b, h, q, k: (k < prefix[b]) | (q >= k)


def dense(mask: torch.Tensor) -> MaskFunction:
    if mask.dim() == 2:
        return lambda b, h, q, k: mask[q, k]
    return lambda b, h, q, k: mask[b, h, q, k]


def blocks(mask: torch.Tensor, block_q: int, block_k: int) -> MaskFunction:
    return lambda b, h, q, k: mask[b, h, q // block_q, k // block_k]


def adjacency(ids: torch.Tensor, allowed: torch.Tensor) -> MaskFunction:
    return lambda b, h, q, k: allowed[ids[q], ids[k]]


def relative(table: torch.Tensor, threshold: float) -> MaskFunction:
    return lambda b, h, q, k: table[q - k + len(table) // 2] > threshold


def offset_table(table: torch.Tensor) -> MaskFunction:
    """Indexed from -len(table) on: negative indices count from the end."""
    return lambda b, h, q, k: table[q - len(table)] <= k


def per_head(b, h, q_idx, kv_idx):
    return torch.where(h < 2, q_idx >= kv_idx, (q_idx - kv_idx).abs() < 100)


# --------------------------------------------------------------------------------- the cases

_OFFSETS = lengths(1000, 12, 0)
_IDS = document_ids(_OFFSETS)
_PREFIX_OF = torch.tensor([0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 10, 10])
_INTERVALS = torch.tensor([[0, 300], [200, 420], [420, 700]])
_CHOSEN = torch.randint(0, 10, (2, 3, 10, 3), generator=torch.Generator().manual_seed(1))
_WAVE = (torch.arange(1999).float() * 0.01).sin().bfloat16()
_ANCESTORS = torch.eye(60, dtype=torch.bool)
for _node in range(1, 60):
    _ANCESTORS[_node] |= _ANCESTORS[(_node - 1) // 2]

#: Masks for which at most 2 % of the empty and full tiles may be left undecided. Lengths are no
#: multiples of tiles.
TIGHT = [
    Case("causal", causal, 1000, 1000),
    Case("causal, more queries", causal, 1000, 300),
    Case("causal, bottom right", lambda b, h, q, k: q + 700 >= k, 300, 1000),
    Case("window", sliding_window(150), 1000, 1000),
    Case("symmetric window", lambda b, h, q, k: (q - k).abs() <= 77, 1000, 1000),
    Case("prefix", or_masks(causal, lambda b, h, q, k: k < 333), 1000, 1000),
    Case("sorted documents", documents(_IDS), 1000, 1000),
    Case("chunked", chunked(100), 1000, 1000),
    Case("dilated", dilated(300, 7), 1000, 1000),
    Case("block diffusion", block_diffusion(500, 48), 1000, 1000),
    Case("where per head", per_head, 1000, 1000, heads=3),
    Case("not", lambda b, h, q, k: ~((q >= k) & (q - k < 200)), 1000, 1000),
    Case("xor", lambda b, h, q, k: (q >= k) ^ (k < 400), 1000, 1000),
    Case("1-d neighbourhood", natten_1d(1000, 101), 1000, 1000),
    Case("2-d neighbourhood", natten_2d(50, 20, 13, 7), 1000, 1000),
    Case("2-d neighbourhood, wide rows", natten_2d(250, 4, 33, 3), 1000, 1000),
    Case("3-d neighbourhood", natten_3d((6, 12, 14), (3, 5, 7)), 1008, 1008),
    Case("window per head", window_per_head(torch.tensor([30, 100, 300, 100])), 1000, 1000, 1, 4),
    Case("local causal documents", local(causal, _OFFSETS), 1000, 1000),
    Case("dense", dense(random((500, 700), 0.001)), 500, 700),
    Case("dense per head", dense(random((2, 2, 300, 200), 0.003)), 300, 200, 2, 2),
    Case("block matrix", blocks(random((2, 2, 8, 16), 0.3), 128, 64), 1000, 1000, 2, 2),
]

#: Masks in attention-gym's style, and some beyond, that must be sound.
SOUND = [
    Case("local window documents", local(sliding_window(60), _OFFSETS), 1000, 1000),
    Case("packed causal documents", packed_causal(_OFFSETS), 1000, 1000),
    Case("tiled neighbourhood", tiled_natten(32, 32, 9, 8), 1024, 1024),
    Case("morton neighbourhood", morton_natten(32, 9), 1024, 1024),
    Case("sliding tiles with text", sliding_tiles(24, 12, 4, 30), 616, 616),
    Case("flamingo", flamingo(_INTERVALS, 64), 700, 192),
    Case("global tokens", global_tokens(60, random((900,), 0.01)), 900, 900),
    Case("tree", tree(400, _ANCESTORS), 60, 460),
    Case("draft training", draft_training(130, 24), 480, 610),
    Case("shared prefix", shared_prefix(_OFFSETS, _PREFIX_OF), 1000, 1000),
    Case("top-k tiles", top_k_tiles(_CHOSEN, 64), 640, 640, 2, 3),
    Case("batched causal", batched(causal, 170), 1000, 1000),
    Case("temporal head", temporal_head(100, 90, 20), 1000, 1000),
    Case("unsorted documents", documents(_IDS * 7 % 12), 1000, 1000),
    Case("interleaved documents", documents(torch.arange(900) % 9), 900, 900),
    Case("adjacency of documents", adjacency(_IDS, random((12, 12), 0.3)), 1000, 1000),
    Case("relative table", relative(_WAVE, 0.5), 1000, 1000),
    Case("float scores", lambda b, h, q, k: torch.exp(-(q - k).abs() / 50.0) > 0.1, 700, 700),
    Case("bit trick", lambda b, h, q, k: ((q ^ k) & 96) == 0, 700, 700),
    Case("stripes", lambda b, h, q, k: (k % 128 == q % 128) | (q - k == 0), 700, 700),
    Case("prefix per batch", prefix_per_batch(torch.tensor([0, 500, 90])), 600, 600, 3, 2),
    Case("negative index", offset_table(torch.arange(600)), 600, 600),
    Case("all", lambda b, h, q, k: q >= 0, 300, 200),
    Case("none", lambda b, h, q, k: q < 0, 300, 200),
]
CASES = [*TIGHT, *SOUND]
