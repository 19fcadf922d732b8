"""The set-up script: its help lists its commands, and CI runs what the README says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_help_lists_every_command() -> None:
    shown = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^\./dev (\w+)", shown, re.MULTILINE)
    known = re.findall(r"^  (\w+)\)", (ROOT / "dev").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(known)


def test_an_unknown_command_is_an_error() -> None:
    done = subprocess.run([ROOT / "dev", "tset"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "tset" in done.stderr


def test_ci_runs_the_command_of_the_readme() -> None:
    assert "./dev test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "./dev test"
