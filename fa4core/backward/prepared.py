"""`PreparedBackward`: a backward pass whose plan is made and whose kernels are loaded.

As `fa4core.prepared` for the forward pass. The main kernel's host function takes q, k, v, dO, dK,
dV (batch, rows, heads, d), packed tensors without a batch, the padded tensors (`rows`) LSE, delta,
dQ and turns, items, runs, captured tensors and their gradients, the scale and its CTAs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.backward.exact import BINS, totals
from fa4core.backward.launch import Launches, Skeleton, launches
from fa4core.compile.cache import obtain
from fa4core.places import Place
from fa4core.prepared import covered, keep_for_graphs, moved, new, shown, without_memory
from fa4core.reference.backward import Gradients, joined, sinks
from fa4core.reference.tiled import Call

Tensor = torch.Tensor
Form = Callable[[Tensor], Tensor] | None


@attrs.frozen(eq=False)
class _Loaded:
    """What is launched.

    Attributes:
        before, main, after: Host functions; the main ones all take the same.
        table: `Rows.table`.
        spaces: Padded LSE, delta, dQ and turns, without memory.
        rest: Arguments of the main kernel: the plan and captured tensors.
        ctas: Of the main kernel.
    """

    before: Callable[..., Any]
    main: tuple[Callable[..., Any], ...]
    after: Callable[..., Any]
    table: Any
    spaces: tuple[Tensor, ...]
    rest: tuple
    ctas: int


@attrs.frozen(eq=False)
class PreparedBackward:
    """See the module. Call it with tensors of the shapes and strides it was prepared for.

    Attributes:
        call: The call of the forward pass.
        loaded: Its kernels; None if there is nothing to launch.
        forms: What makes of dO, q, k, v and out what kernels take, or None where they take it as
            it is.
        grads: dQ, dK and dV, without memory.
        fill: Whether there are rows of each that no kernel writes.
        receivers: For each captured tensor with a gradient: the tensor, and its sums' shape.
        exact: Whether these sums are bins, see `exact`.
        place: Where the kernels run.
    """

    call: Call
    loaded: _Loaded | None
    forms: tuple[Form, ...]
    grads: tuple[Tensor, ...]
    fill: tuple[bool, ...]
    receivers: tuple[tuple[Any, tuple[int, ...]], ...]
    exact: bool
    place: Place

    @property
    def rest(self) -> tuple:
        """What must live as long as a launch may read it."""
        return () if self.loaded is None else (self.loaded.table, *self.loaded.rest)

    def __call__(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        """Gradients of everything, each in its input's dtype."""
        keep_for_graphs(self, q.device)
        grad_q, grad_k, grad_v = grads = [new(grad) for grad in self.grads]
        for grad, fill in zip(grads, self.fill, strict=True):
            if fill:
                grad.zero_()
        kind = torch.int64 if self.exact else torch.float32
        sums = [torch.zeros(s, dtype=kind, device=q.device) for _, s in self.receivers]
        if self.loaded is not None:
            given = zip((grad_out, q, k, v, out), self.forms, strict=True)
            shown_ = (t if f is None else f(t) for t, f in given)
            of_rows = (lse if t is None else t.contiguous() for t in (lse, grad_lse))
            self._launch(self.loaded, (*shown_, *of_rows), grads, sums)
        by_score = {
            capture: (totals(total) if self.exact else total).view(capture.tensor.shape)
            for (capture, _), total in zip(self.receivers, sums, strict=True)
        }
        by_sink = sinks(self.call, out, lse, grad_out, grad_lse)
        return Gradients(grad_q, grad_k, grad_v, joined(by_score, by_sink))

    def _launch(
        self, loaded: _Loaded, given: tuple[Tensor, ...], grads: list[Tensor], sums: list[Tensor]
    ) -> None:
        grad_out, q, k, v, out, lse, grad_lse = given
        grad_q, grad_k, grad_v = grads
        scale = float(self.call.scale)
        rows = of_lse, delta, sum_q, turns = [new(space) for space in loaded.spaces]
        loaded.before(out, grad_out, lse, grad_lse, loaded.table, *rows)
        of_captured = self.place.converted(tuple(sums))
        for main in loaded.main:
            main(
                q, k, v, grad_out, grad_k, grad_v, of_lse, delta, sum_q, turns, *loaded.rest,
                of_captured, scale, loaded.ctas,
            )  # fmt: skip
        loaded.after(sum_q, loaded.table, grad_q, scale)


def _load(found: Launches, place: Place, device: torch.device) -> _Loaded:
    assert place.launcher is not None
    heads, d, tiles = found.heads, found.spec.d, found.rows // found.spec.queries
    shapes = (heads, found.rows), (heads, found.rows), (heads, found.rows, d), (heads, tiles)
    dtypes = (torch.float32, torch.float32, torch.float32, torch.int32)
    before, *main, after = (place.launcher(obtain(k).function) for k in found.kernels)
    table, *rest = (place.converted(moved(t, device)) for t in (found.table, *found.rest))
    spaces = (without_memory(s, t, device) for s, t in zip(shapes, dtypes, strict=True))
    return _Loaded(before, tuple(main), after, table, tuple(spaces), tuple(rest), found.ctas)


def prepare(
    skeleton: Skeleton,
    call: Call,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    place: Place,
    deterministic: bool,
) -> PreparedBackward:
    """Plan a backward pass, compile or find its kernels, and bring its tables to where it runs.

    Args:
        skeleton: The target's kernels.
        call: That of the forward pass, validated and supported.
        grad_out, grad_lse, q, k, v, out: As in the forward pass, with gradients.
        place: Where it will run.
        deterministic: Whether gradients are the same bit by bit in every run.
    """
    found = launches(skeleton, call, place, deterministic, grad_lse is not None)
    loaded = None if found is None else _load(found, place, q.device)
    of_q, of_k = covered(call.problem.seqlens_q, q), covered(call.problem.seqlens_k, k)
    fill = (not of_q, not of_k, not of_k) if loaded is not None else (True,) * 3
    # one entry that stands for all would have to be told from one that is alone
    forms = tuple(shown(t, queries=True) for t in (grad_out, q, k, v, out))
    receivers = () if found is None else found.receivers
    bins = (BINS,) if deterministic else ()
    prepared = PreparedBackward(
        call,
        loaded,
        forms,
        tuple(without_memory(tuple(t.shape), t.dtype, t.device) for t in (q, k, v)),
        fill,
        tuple((c, (*(c.tensor.shape or (1,)), *bins)) for c in receivers if c.tensor is not None),
        deterministic,
        place,
    )
    place.follow(prepared)
    return prepared
