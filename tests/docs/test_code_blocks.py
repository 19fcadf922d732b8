"""Runs every code block of README, CONTRIBUTING and docs.

The blocks of a page run in order and share their names, as a reader would type them:

- `python` is executed; what follows `>>>` is compared.
- `sh` is run by bash, but for set-up commands: those would run these tests again, so only their
  names are checked.
- `text` directly behind one of these is its output and is compared; `...` stands for anything.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sybil import Example, Sybil
from sybil.example import SybilFailure
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from primitives import mask, score

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SLOW = {
    "docs/timing.md",
    "docs/api/cli.md",
    "docs/howto/report.md",
}  # in the sweep: modelled time, many processes
LANGUAGES = {"python", "sh", "text"}
SET_UP = re.compile(r"(git clone|cd) |\./dev( |$)")
COMPARE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_shell(example: Example) -> None:
    commands = set(re.findall(r"^\./dev (\w+)", example.parsed, re.MULTILINE))
    known = set(re.findall(r"^  (\w+)\)", (ROOT / "dev").read_text(), re.MULTILINE))
    assert commands <= known, f"./dev has no command {commands - known}"
    lines = [line for line in example.parsed.splitlines() if not SET_UP.match(line)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{example.parsed}\n{done.stderr}"
    print(done.stdout)


def show_output(example: Example) -> None:
    """Outputs are compared in `run_page`, which knows what was printed."""


def run_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parsers = [
        PythonCodeBlockParser(),
        CodeBlockParser(language="sh", evaluator=run_shell),
        CodeBlockParser(language="text", evaluator=show_output),
    ]
    document = Sybil(parsers=parsers).parse(page)
    end, printed = 0, ""
    for example in document.examples():
        behind = not document.text[end : example.start].strip()
        if example.region.evaluator is show_output and behind and printed:
            wanted = str(example.parsed)
            assert doctest.OutputChecker().check_output(wanted, printed, COMPARE), (
                f"{page.name}, line {example.line} shows\n{wanted}\nthe code printed\n{printed}"
            )
        example.evaluate()
        end, printed = example.end, capsys.readouterr().out


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the blocks write is thrown away; pictures need no screen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


def parameter(page: Path):
    name = str(page.relative_to(ROOT))
    return pytest.param(page, marks=[pytest.mark.sweep] if name in SLOW else [], id=name)


@pytest.mark.parametrize("page", list(map(parameter, PAGES)))
def test_every_block_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_are_of_a_kind_that_runs(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert {fence.strip() for fence in fences[::2]} <= LANGUAGES


@pytest.mark.parametrize(
    "page",
    [
        "```python\nassert 1 == 2\n```\n",
        "```python\n>>> 1 + 1\n3\n```\n",
        "```python\nprint(2)\n```\n\n```text\n3\n```\n",
        "```sh\nfalse\n```\n",
        "```sh\n./dev nonsense\n```\n",
    ],
)
def test_a_wrong_block_fails(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the tests above."""
    (tmp_path / "page.md").write_text(page)
    with pytest.raises((AssertionError, SybilFailure)):
        run_page(tmp_path / "page.md", capsys)


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda p: p.name)
def test_pages_outside_docs_link_to_files_that_exist(page: Path) -> None:
    """Links inside docs are mkdocs' business."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (ROOT / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`tests/...` and the like, wildcards included."""
    folders = "tests|fa4core|primitives|variants|benchmarks|examples|docs"
    for path in re.findall(rf"`((?:{folders})/[\w/.*-]+)`", page.read_text()):
        assert any(ROOT.glob(path.rstrip("/"))), f"{page.name} names {path}"


@pytest.mark.parametrize("package", [mask, score], ids=["mask", "score"])
def test_concept_pages_list_everything_ready_made(package: ModuleType) -> None:
    page = (ROOT / "docs" / "concepts" / f"{package.__name__.split('.')[-1]}.md").read_text()
    missing = [name for name in package.__all__ if not re.search(rf"\b{name}\b", page)]
    assert not missing
