"""How the project prints: rich tables on a terminal, the same as plain text elsewhere.

Used by `fa4core.plan.report`, the static report and the command line.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 100


def plain(*parts: RenderableType) -> str:
    """As text of at most 100 columns, without colours."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_terminal=False)
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def show(*parts: RenderableType) -> None:
    """With colours on a terminal; as plain text into a file or a pipe."""
    if sys.stdout.isatty():
        Console().print(*parts)
    else:
        print(plain(*parts))


def section(title: str, body: RenderableType) -> Iterator[RenderableType]:
    """A title, if there is one, and what belongs to it."""
    if title:
        yield Text(title, style="bold cyan")
    yield Padding(body, (0, 0, 1, 2))


def facts(rows: list[tuple[str, str]]) -> Table:
    """Labels and what they say."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def grid(*titles: str, left: int = 1) -> Table:
    """A table without lines: `left` columns of text, then numbers."""
    table: Any = Table(box=None, pad_edge=False, padding=(0, 2))
    for n, title in enumerate(titles):
        text = n < left
        table.add_column(title, justify="left" if text else "right", no_wrap=not n)
    return table
