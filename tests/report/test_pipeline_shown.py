"""`explain --pipeline`: the declaration of the very kernel that a call gets."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.cli import main
from fa4core.report.pipeline import call_for
from fa4core.sm100.forward.launch import spec_of
from variants.causal import causal


def shown(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["explain", *arguments, "--pipeline"])
    assert result.exit_code == code, result.output
    return result.output


def test_everything_declared_is_shown() -> None:
    from fa4core.cli_variant import requested

    text = shown("variants.causal", "--seqlen", "1024")
    sizes = dict(seqlen=1024, seqlen_q=None, seqlen_k=None, batch=1, lengths=None, heads=1)
    _, problem = requested(
        "variants.causal",
        (),
        **sizes,
        kv_heads=None,
        head_dim=None,
        head_dim_v=None,
        dtype="bfloat16",
    )
    spec = spec_of(call_for(causal(), problem, "sm100"), "sm100")
    pipeline = spec.pipeline
    for role in pipeline.roles:
        assert re.search(rf"^  {role.name} .* {role.registers}$", text, re.MULTILINE)
    for signal in pipeline.signals:
        count = pipeline.count(signal)
        assert re.search(rf"^  {signal.name} .* {count}$", text, re.MULTILINE)
    for name, placed in (spec.smem | spec.tmem).items():
        assert re.search(rf"^  {name} .*\b{placed.offset:,}\b", text, re.MULTILINE)
    assert "holds for all 125 lists" in text


def test_the_problem_decides() -> None:
    one, two = shown("variants.causal", "--seqlen", "128"), shown("variants.causal")
    assert "softmax       0..3" in one and "softmax       0..7" in two


def test_calls_without_a_kernel_are_refused_with_the_reason() -> None:
    assert "float32" in shown("variants.causal", "--dtype", "float32", code=1)
    assert "choose sm100" in shown("variants.causal", "--target", "cpu", code=1)


def test_a_pair_of_ctas_says_where_roles_run_and_arrive(tmp_path, monkeypatch) -> None:
    (tmp_path / "a_pair.py").write_text(
        "from fa4core import Variant\n"
        "from primitives.schedule import Schedule\n"
        "def pair():\n    return Variant(schedule=Schedule(ctas=2))\n"
    )
    monkeypatch.chdir(tmp_path)
    text = shown("a_pair:pair", "--seqlen", "1024")
    assert "in each of 2 CTAs" in text and "mma (first CTA only)" in text
    assert "commit at all CTAs" in text and "tma at the first CTA" in text


def test_it_needs_no_dsl() -> None:
    """The declaration is plain Python; only the checker's run needs the role code."""
    script = (
        "import sys; sys.modules['cutlass'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'cutlass' else find(name, *rest)\n"
        "sys.argv[1:] = ['explain', 'variants.causal', '--seqlen', '256', '--pipeline']\n"
        "from fa4core.cli import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "p_ready" in done.stdout
    assert "not run: role code imports CuTe DSL" in done.stdout
