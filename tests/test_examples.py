"""The programs in `examples/` run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_model_trains_with_checkpoints_or_without(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    said = []
    for more in ((), ("--checkpoint",)):
        picture = tmp_path / f"train{len(more)}.png"
        options = ["--steps", "2", "--seqlen", "48", "--picture", str(picture), *more]
        monkeypatch.setattr(sys, "argv", ["train.py", *options])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
        said.append(capsys.readouterr().out.replace(picture.name, ""))
        assert picture.stat().st_size > 0
    assert "learned slopes: 4." in said[0] and said[0] == said[1]
