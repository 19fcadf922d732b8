"""`Problem`: the sizes of one attention call, read from its tensors and checked.

Every backend and every analysis takes its sizes from here, so an input is validated once.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from primitives.sequence import Layout
from primitives.wording import counted, typed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: The least value of each size. A batch without sequences and a call without heads are empty calls.
_LEAST = {"batch": 0, "heads_q": 0, "heads_kv": 1, "head_dim": 1, "head_dim_v": 1}


def _entries(given: Sequence[int] | None) -> tuple[int, ...] | None:
    """A sequence as a tuple; what is none stays as it is, for the check to name it."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(given)
    return given


def _lengths_of(given: Sequence[int]) -> tuple[int, ...]:
    """As `_entries`, where None is refused."""
    return _entries(given)  # type: ignore[return-value]


@attrs.frozen
class Problem:
    """Sizes of one attention call.

    Attributes:
        batch: Number of sequences.
        heads_q: Query heads, a multiple of `heads_kv`.
        heads_kv: Key and value heads.
        head_dim: Of queries and keys.
        head_dim_v: Of values and outputs.
        seqlens_q: Real query length of each sequence (after `seqused_q`).
        seqlens_k: Real key length of each sequence (after `seqused_k`).
        starts_q: First row of each sequence in the packed queries; None if padded.
        starts_k: Likewise for packed keys; None if padded or paged.
        page_size: Keys in a page, or None.
        dtype: Of queries, keys and values: float16, bfloat16, float32 or float64.

    Raises:
        TypeError, ValueError: Saying which size was given and what is accepted.
    """

    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    seqlens_q: tuple[int, ...] = attrs.field(converter=_lengths_of)
    seqlens_k: tuple[int, ...] = attrs.field(converter=_lengths_of)
    starts_q: tuple[int, ...] | None = attrs.field(default=None, converter=_entries)
    starts_k: tuple[int, ...] | None = attrs.field(default=None, converter=_entries)
    page_size: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def __attrs_post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check_size(name, getattr(self, name), least)
        if self.page_size is not None:
            _check_size("page_size", self.page_size, 1)
        _check_groups(self.heads_q, self.heads_kv)
        _check_entries("seqlens_q", self.seqlens_q, self.batch)
        _check_entries("seqlens_k", self.seqlens_k, self.batch)
        for name in ("starts_q", "starts_k"):
            if getattr(self, name) is not None:
                _check_entries(name, getattr(self, name), self.batch)
        if self.dtype not in DTYPES:
            raise TypeError(
                f"dtype={self.dtype!r}; torch.float16, torch.bfloat16, torch.float32 and "
                "torch.float64 are accepted"
            )

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads_q // self.heads_kv

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout | None = None,
    ) -> Problem:
        """Read the sizes and check that the tensors fit together.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) if packed.
            k: (batch, seqlen_k, heads_kv, head_dim), (total_k, heads_kv, head_dim) if packed, or
                (num_pages, page_size, heads_kv, head_dim) if paged.
            v: As k, with head_dim_v.
            layout: See `primitives.sequence`.

        Raises:
            ValueError, TypeError: Saying what was given, what is accepted and what to do.
        """
        layout = layout or Layout()
        _check_tensors(q, k, v)
        _check_ranks(q, k, v, layout)
        seqlens_q, starts_q = _lengths(q, layout.cu_seqlens_q, layout.seqused_q, "q")
        batch = len(seqlens_q)
        if layout.page_table is not None:
            seqlens_k, starts_k = _paged_lengths(k, layout, batch), None
        else:
            seqlens_k, starts_k = _lengths(k, layout.cu_seqlens_k, layout.seqused_k, "k")
        if len(seqlens_k) != batch:
            given = counted(batch, "sequence")
            raise ValueError(f"q has {given} and k has {len(seqlens_k)}; they must agree")
        _check_bound("max_seqlen_q", layout.max_seqlen_q, seqlens_q)
        _check_bound("max_seqlen_k", layout.max_seqlen_k, seqlens_k)
        heads_q, heads_kv = q.shape[-2], k.shape[-2]
        _check_groups(heads_q, heads_kv)
        return cls(
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            starts_q=starts_q,
            starts_k=starts_k,
            page_size=None if layout.page_table is None else k.shape[1],
            dtype=q.dtype,
        )


def _check_size(name: str, value: object, least: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}; an int >= {least} is accepted")
    if value < least:
        raise ValueError(f"{name}={value}; an int >= {least} is accepted")


def _check_groups(heads_q: int, heads_kv: int) -> None:
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(
            f"{heads_q} query heads on {heads_kv} KV heads; the query heads must be a "
            "multiple of the KV heads"
        )


def _check_entries(name: str, values: object, batch: int) -> None:
    accepted = "one int >= 0 for each sequence is accepted"
    if not isinstance(values, tuple):
        hint = f": {name}=({values},) * batch" if isinstance(values, numbers.Integral) else ""
        hint = f": {name}.tolist()" if isinstance(values, torch.Tensor) else hint
        kind = type(values).__name__
        given = f"{values!r}, a {kind}" if isinstance(values, int | float | str) else f"a {kind}"
        raise TypeError(f"{name} is {given}; a tuple with {accepted}{hint}")
    if len(values) != batch:
        given = counted(len(values), "entry", "entries")
        raise ValueError(f"{name} has {given} for batch={batch}; {accepted}")
    for i, value in enumerate(values):
        if type(value) is not int and (  # asking an abstract class takes far longer
            not isinstance(value, numbers.Integral) or isinstance(value, bool)
        ):
            raise TypeError(f"{name}[{i}] is {value!r}; {accepted}")
        if value < 0:
            raise ValueError(f"{name}[{i}] is {value}; {accepted}")


def _shape(t: torch.Tensor) -> str:
    return str(tuple(t.shape))


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is {typed(t)}; a torch tensor is accepted")
        if t.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {t.dtype}; float16, bfloat16, float32 and float64 are accepted "
                "(the kernels take float16 and bfloat16)"
            )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} and {name} is {t.dtype}; convert them to one dtype")
        if t.device != q.device:
            raise ValueError(
                f"q is on {q.device} and {name} on {t.device}; move them to one device"
            )


def _check_ranks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> None:
    packed_q, packed_k = layout.cu_seqlens_q is not None, layout.cu_seqlens_k is not None
    paged = layout.page_table is not None
    q_form = "(total_q, heads, d)" if packed_q else "(batch, seqlen_q, heads, d)"
    k_form = "(total_k, heads, d)" if packed_k else "(batch, seqlen_k, heads, d)"
    k_form = "(num_pages, page_size, heads, d)" if paged else k_form
    for name, t, rank, form in (
        ("q", q, 3 if packed_q else 4, q_form),
        ("k", k, 3 if packed_k else 4, k_form),
        ("v", v, 3 if packed_k else 4, k_form),
    ):
        if t.dim() != rank:
            packed = t.dim() == 3 and rank == 4 and not paged
            hint = "; packed tensors need layout=sequence.varlen(cu_seqlens_q)" if packed else ""
            with_ = "without a layout" if not layout.tensors else "with this layout"
            raise ValueError(f"{name} has shape {_shape(t)}; {with_} {form} is accepted{hint}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k has shape {_shape(k)} and v {_shape(v)}; all but the last dimension must agree"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]} and k {k.shape[-1]}; they must agree")
    if not packed_q and not packed_k and not paged and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} and k {k.shape[0]}; they must agree")
    if 0 in (q.shape[-1], v.shape[-1]):
        raise ValueError(f"head dims {q.shape[-1]} and {v.shape[-1]}; positive ones are accepted")
    for name, t in layout.tensors.items():
        if t.device != q.device:
            raise ValueError(
                f"q is on {q.device} and {name} on {t.device}; move them to one device"
            )


def _lengths(
    t: torch.Tensor, cumulative: torch.Tensor | None, used: torch.Tensor | None, name: str
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Length of each sequence, and the first row of each if packed."""
    if cumulative is None:
        lengths, starts = [t.shape[1]] * t.shape[0], None
    else:
        ends = cumulative.tolist()
        if not ends or ends[0] != 0 or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(
                f"cu_seqlens_{name} is {_brief(ends)}; it must start with 0 and never decrease"
            )
        if ends[-1] > t.shape[0]:
            raise ValueError(
                f"cu_seqlens_{name} ends at {ends[-1]}, but {name} has {t.shape[0]} rows"
            )
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        starts = tuple(ends[:-1])
    return _used(lengths, used, name), starts


def _check_bound(name: str, bound: int | None, lengths: tuple[int, ...]) -> None:
    if bound is not None and lengths and max(lengths) > bound:
        longest = max(lengths)
        raise ValueError(f"{name}={bound}, but a sequence has length {longest}; give a true bound")


def _used(lengths: list[int], used: torch.Tensor | None, name: str) -> tuple[int, ...]:
    if used is None:
        return tuple(lengths)
    given = used.tolist()
    if len(given) != len(lengths):
        raise ValueError(
            f"seqused_{name} has {counted(len(given), 'entry', 'entries')} for "
            f"{counted(len(lengths), 'sequence')}; one each"
        )
    for i, (n, most) in enumerate(zip(given, lengths, strict=True)):
        if not 0 <= n <= most:
            raise ValueError(f"seqused_{name}[{i}] is {n}; sequence {i} has room for 0..{most}")
    return tuple(given)


def _paged_lengths(k: torch.Tensor, layout: Layout, batch: int) -> tuple[int, ...]:
    table, used = layout.page_table, layout.seqused_k
    assert table is not None and used is not None
    pages, page_size = k.shape[0], k.shape[1]
    if table.shape[0] != batch:
        given = counted(table.shape[0], "row")
        raise ValueError(f"page_table has {given} for {counted(batch, 'sequence')}; one each")
    lengths = _used([table.shape[1] * page_size] * batch, used, "k")
    entries = table.numpy(force=True)  # at once: from a GPU every look would be a copy
    needed = np.arange(table.shape[1]) < -(-np.array(lengths) // page_size)[:, None]
    wrong = (needed & ((entries < 0) | (entries >= pages))).any(axis=1)
    for i in np.flatnonzero(wrong):
        row = entries[i][needed[i]]
        raise ValueError(
            f"page_table[{i}] names pages {row.min()}..{row.max()}; pages 0..{pages - 1} exist"
        )
    return lengths


def _brief(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
