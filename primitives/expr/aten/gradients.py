"""Rules of what only torch's own derivatives call: gradients of indexing and of activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.arrays import Scatter, Value
from primitives.expr.aten.rules import (
    RULES,
    Result,
    as_array,
    as_value,
    promoted,
    rule,
)
from primitives.expr.errors import Refusal

RULES |= {
    "aten.tanh_backward": promoted(lambda g, y: A.mul(g, A.sub(1.0, A.mul(y, y)))),
    "aten.sigmoid_backward": promoted(lambda g, y: A.mul(g, A.mul(y, A.sub(1.0, y)))),
    "aten.threshold_backward": promoted(lambda g, x, t: A.where(A.less(t, x), g, 0.0)),
}


@rule("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def _index_put(out: Result, a: Any, indices: Sequence[Any], value: Any, *flags: Any) -> Value:
    """`zeros.index_put(indices, value, accumulate=True)`: the gradient of indexing."""
    base, given = as_value(a), [None if i is None else as_array(i) for i in indices]
    if not isinstance(base, Scatter) or any(i is not None and i.shape for i in given):
        raise Refusal("writing into a tensor inside a mask or score function")
    given += [None] * (len(base.shape) - len(given))
    entries = []
    for position, node in arrays.scatter(as_value(value)).entries:
        rest = iter(position)
        entries.append((tuple(next(rest) if i is None else i.scalar for i in given), node))
    return Scatter(out.shape, base.entries + tuple(entries))


@rule("aten.select_scatter", "aten.select_backward")
def _select_scatter(out: Result, a: Any, *args: Any) -> Value:
    if isinstance(args[0], list | tuple):  # select_backward(grad, sizes, dim, index)
        source, dim, index, base = a, args[1], args[2], Scatter(out.shape)
    else:  # select_scatter(zeros, source, dim, index)
        (source, dim, index), base = args, arrays.scatter(as_value(a))
    dim %= len(out.shape)
    fixed = A.const(index % out.shape[dim])
    entries = arrays.scatter(as_value(source)).entries
    return Scatter(
        out.shape, base.entries + tuple(((*i[:dim], fixed, *i[dim:]), v) for i, v in entries)
    )


@rule("aten.slice_scatter", "aten.slice_backward")
def _slice_scatter(out: Result, a: Any, *args: Any) -> Value:
    if isinstance(args[0], list | tuple):  # slice_backward(grad, sizes, dim, start, end, step)
        source, (dim, start, end, step) = a, args[1:5]
        base = Scatter(out.shape)
    else:  # slice_scatter(zeros, source, dim, start, end, step)
        source, base = args[0], arrays.scatter(as_value(a))
        dim, start, end, step = list(args[1:]) + [0, None, None, 1][len(args) - 1 :]
    dim %= len(out.shape)
    first, _, _ = slice(start, end, step).indices(out.shape[dim])
    entries = arrays.scatter(as_value(source)).entries
    return Scatter(
        out.shape,
        base.entries
        + tuple(
            ((*i[:dim], A.add(A.mul(i[dim], step), first), *i[dim + 1 :]), v) for i, v in entries
        ),
    )
