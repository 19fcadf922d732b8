"""Sizes of a PTX entry's parameters: the launch passes one pointer per parameter and no sizes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?", re.DOTALL)
_PARAMETER = re.compile(r"\.param\b([^,\[\]]*?)([\w$%]+)\s*(?:\[(\d*)\])?\s*(?:,|$)")
_TYPE = re.compile(r"\.(?:b|u|s|f)(8|16|32|64|128)\b")


@functools.lru_cache(maxsize=64)
def parameter_sizes(ptx: str) -> Mapping[str, tuple[int, ...]]:
    """Bytes of each parameter, in order, by entry name (PTX ISA: kernel function parameters)."""
    sizes: dict[str, tuple[int, ...]] = {}
    for entry, declared in _ENTRY.findall(ptx):
        found = []
        for attributes, _, count in _PARAMETER.findall(declared.strip()):
            width = _TYPE.search(attributes)
            if width is None:
                raise ValueError(f"parameter of {entry} without a type: {attributes!r}")
            found.append(int(width.group(1)) // 8 * (int(count) if count else 1))
        sizes[entry] = tuple(found)
    return sizes
