"""What the SM100 forward kernel takes, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.forward.support import refusal

__all__ = ["refusal"]
