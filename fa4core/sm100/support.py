"""What the SM100 kernels take, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.backward.support import refusal as backward_refusal
from fa4core.forward.support import refusal

__all__ = ["backward_refusal", "refusal"]
