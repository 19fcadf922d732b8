"""Words of messages: counts, articles, very large numbers."""

from __future__ import annotations


def counted(number: int, one: str, more: str = "") -> str:
    """A count with its noun: "1 sequence", "2 sequences"; `more` if it isn't `one` with an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def typed(value: object) -> str:
    """The type of a value with its article: "an int", "a Mask"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def brief(value: float) -> str:
    """A number; of very large ints the number of bits."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"an int of {abs(value).bit_length()} bits"
    return str(value)
