"""Runs every code block of README, CONTRIBUTING and docs.

The blocks of a page run in order and share their names, as a reader would type them. `python`
blocks are executed, with outputs after `>>>` compared; `sh` blocks are run by bash, but for set-up
commands, of which only the sub-command is checked (running them here would run these tests again).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUN = {"python", "sh"}
SHOWN = {"text", "bibtex"}  # outputs and citations
SET_UP = re.compile(r"(git clone|cd) |\./dev( |$)")


def run_shell(example: Example) -> None:
    lines = [line for line in example.parsed.splitlines() if not SET_UP.match(line)]
    for command in re.findall(r"^\./dev (\w+)", example.parsed, re.MULTILINE):
        assert f"  {command})" in (ROOT / "dev").read_text(), f"./dev has no command {command}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        check=True,
    )


def parse(page: Path) -> Document:
    parsers = [PythonCodeBlockParser(), CodeBlockParser(language="sh", evaluator=run_shell)]
    return Sybil(parsers=parsers).parse(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what blocks write is thrown away
    for example in parse(page).examples():
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_are_of_a_kind_that_runs(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
    languages = {fence.strip() for fence in fences[::2]}
    assert len(fences) % 2 == 0 and languages <= RUN | SHOWN, languages


def test_a_wrong_block_fails(tmp_path: Path) -> None:
    """Guards the tests above: a block that raises, and one that prints something else."""
    for source in ("assert 1 == 2", ">>> 1 + 1\n3"):
        page = tmp_path / "page.md"
        page.write_text(f"```python\n{source}\n```\n")
        with pytest.raises((AssertionError, Exception), match=r"1 == 2|Expected|^$"):
            for example in parse(page).examples():
                example.evaluate()


def test_pages_name_files_that_exist() -> None:
    """mkdocs checks the links of docs/; README and CONTRIBUTING are checked here."""
    for page in PAGES[:2]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
