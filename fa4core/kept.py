"""`Calls`: the prepared calls of a variant, kept to run again.

Variants that are the same text over the very same tensors share one, so an operator, which gets
text and tensors instead of a variant, finds it, too. It lives as long as one of them.

Calls are found by what their tensors are, `fa4core.recall` says how. Tensors that a plan was made
from, captured ones and those of a layout, are compared by identity, address and version: torch
raises the version at every in-place change.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import WeakValueDictionary

import attrs
import torch

MOST = 64  # prepared calls of one variant

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Kept:
    """A prepared call and what it depends on.

    Attributes:
        prepared: The call: a `Prepared`, or a `PreparedBackward`.
        watched: (tensor, address, version); version -1 where the kernel itself reads the values.
        held: Tensors whose `id` is part of the key: alive, so that no other gets it.
    """

    prepared: Any
    watched: tuple[tuple[Tensor, int, int], ...]
    held: tuple[Tensor, ...]

    def is_current(self) -> bool:
        for tensor, address, version in self.watched:
            if tensor.data_ptr() != address or (version >= 0 and tensor._version != version):
                return False
        return True


class Calls(OrderedDict[tuple, Kept]):
    """The newest `MOST` calls by their keys.

    Attributes:
        arguments: The captured tensors: alive, so that no others get their places in `_known`.
    """

    arguments: tuple[Tensor, ...]

    def find(self, key: tuple) -> Any:
        """The call that was kept under a key, if it still holds; else None."""
        kept = self.get(key)
        return kept.prepared if kept is not None and kept.is_current() else None

    def keep(self, key: tuple, kept: Kept) -> None:
        self[key] = kept
        self.move_to_end(key)
        while len(self) > MOST:
            self.popitem(last=False)


_known: WeakValueDictionary[tuple, Calls] = WeakValueDictionary()


def calls_of(spec: str, arguments: list[Tensor]) -> Calls:
    """Those of all variants of this text over these very tensors, for one of them to own."""
    found = known_calls(spec, arguments)
    if found is None:
        found = _known[spec, *map(id, arguments)] = Calls()
        found.arguments = tuple(arguments)
    return found


def known_calls(spec: str, arguments: list[Tensor]) -> Calls | None:
    """The same, or None if no variant owns any."""
    return _known.get((spec, *map(id, arguments)))
