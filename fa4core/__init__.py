"""fa4core: attention variants composed from orthogonal primitives."""

from fa4core.attention import attention
from fa4core.variant import Variant

__all__ = ["Variant", "attention"]
