"""The command line."""

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from fa4core import cli
from fa4core.cli_variant import prebuilt


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.main, arguments)
    if code == 0 and result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_of_the_readme():
    found = run("explain", "variants.sliding_window", "--seqlen", "8192", "--window", "1024")
    assert "sliding_window(1024" in found
    assert "8,192 queries x 8,192 keys" in found
    assert "modelled" in found


def test_options_reach_the_factory():
    found = run("explain", "variants.sliding_window", "--window=7", "--sink-tokens", "3")
    assert "now 7" in found
    assert "now 3" in found
    assert "causal" not in run("explain", "variants.document", "--no-causal", "--documents", "3")
    assert "now 1_000" not in run("explain", "variants.softcap", "--window", "none")


def test_sizes_reach_the_problem_and_the_factory():
    found = run(
        "explain", "variants.alibi", "--heads", "12", "--kv-heads", "3", "--seqlen-q", "1",
        "--seqlen", "500", "--batch", "2", "--dtype", "float16", "--target", "sm90",
    )  # fmt: skip
    assert "2 sequences of 1 queries x 500 keys" in found
    assert "12 query heads on 3 KV heads" in found
    assert "float32 (12,)" in found  # ALiBi's slopes, for as many heads
    assert "float16" in found
    assert "sm90 (NVIDIA H200)" in found


def test_the_modules_head_dims_are_the_default():
    assert "head dim 192, 128" in run("explain", "variants.mla", "--seqlen", "1024")
    given = run("explain", "variants.mla", "--seqlen", "256", "--head-dim", "64")
    assert "head dim 64," in given
    given = run("explain", "variants.mla", "--seqlen", "256", "--head-dim-v", "64")
    assert "head dim 192, 64," in given


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    path = tmp_path / "out.png"
    found = run("explain", "variants.causal", "--seqlen", "512", "--draw", str(path))
    assert f"drawn: {path}" in found
    assert path.read_bytes()[:4] == b"\x89PNG"


OWN = """
from typing import Literal
import torch
from fa4core import Variant
from primitives import mask

def mine(window: int, sides: Literal["left", "both"] = "left", table: torch.Tensor | None = None,
         scale: float = 1.0, loud: bool = False) -> Variant:
    print("called", window, sides, table, scale, loud)
    return Variant(mask=mask.sliding_window(window, window if sides == "both" else 0))

def broken():
    return 1 // 0

def notvar():
    return 3

def only_mask():
    return mask.causal()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_variant.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield "own_variant:mine"
    sys.modules.pop("own_variant", None)


def test_a_variant_of_ones_own(own):
    found = run(
        "explain", own, "--seqlen", "64", "--window", "9", "--sides", "both", "--table", "1,2.5",
        "--scale", "3", "--loud",
    )  # fmt: skip
    assert "called 9 both tensor([1.0000, 2.5000]) 3.0 True" in found


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            ["--windw", "5"],
            ["no option '--windw'", "Did you mean --window?", "accepts --window INT"],
        ),
        (["--window"], ["--window needs a value"]),
        (["--window", "five"], ["'five' is no INT"]),
        (["--window", "5", "--sides", "right"], ["'right' is no left | both"]),
        (["--window", "5", "extra"], ["'extra' belongs to no option"]),
        ([], ["needs --window INT"]),
    ],
)
def test_wrong_options_say_what_is_accepted(own, arguments, messages):
    found = " ".join(run("explain", own, *arguments, code=2).split())
    for message in messages:
        assert message in found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("variants.sliding_windo", "Did you mean variants.sliding_window?"),
        ("variants.causal:nothing", "has no function 'nothing'"),
        ("no.such.module", "`python -m fa4core variants` lists"),
        ("--window", "name the variant first"),
    ],
)
def test_wrong_variants(name, message):
    assert message in " ".join(run("explain", name, code=2).split())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("notvar", "own_variant:notvar returned a int; a function that returns a fa4core.Variant"),
        ("only_mask", "returned a Mask; a function that returns a fa4core.Variant is accepted; "
         "return Variant(mask=...)"),
    ],
)  # fmt: skip
def test_functions_that_return_no_variant(own, function, message):
    assert message in " ".join(run("explain", f"own_variant:{function}", code=2).split())


def test_a_picture_into_no_folder_is_refused_before_the_work(own, tmp_path):
    path = tmp_path / "nowhere" / "x.png"
    found = run("explain", own, "--window", "9", "--draw", str(path), code=2)
    assert "there is no folder" in found and "called" not in found


def test_a_picture_that_can_not_be_written_is_a_message(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    path = str(tmp_path / "x.png")
    assert "No space" in run("explain", "variants.causal", "--seqlen", "64", "--draw", path, code=1)


def test_errors_of_the_problem_are_messages():
    found = run("explain", "variants.causal", "--heads", "6", "--kv-heads", "4", code=2)
    assert "must be a multiple" in found
    assert "left=-5" in run("explain", "variants.sliding_window", "--window", "-5", code=1)
    assert "accepted are" in run("explain", "variants.causal", "--backend", "cuda", code=1)


def test_prebuilt_variants_are_listed():
    found = run("variants")
    for name in prebuilt():
        if name != "flex":
            assert f"variants.{name}" in found
    assert "--window INT (default 1024)" in found


def test_every_prebuilt_variant_can_be_explained():
    listed = [n for n in prebuilt() if f"variants.{n}" in run("variants")]
    assert len(listed) >= 10
    for name in listed:
        assert "Tiles" in run("explain", f"variants.{name}", "--seqlen", "1024")


def test_commands_that_are_not_there_are_not_listed(monkeypatch):
    monkeypatch.setitem(cli.LAZY, "emulate", "fa4core.no_such_package.cli")
    assert "emulate" not in run("--help")
    run("emulate", code=2)


def test_python_dash_m():
    command = [sys.executable, "-m", "fa4core", "explain", "variants.causal", "--seqlen", "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Tiles" in done.stdout
    assert all(line == line.rstrip() and len(line) <= 100 for line in done.stdout.splitlines())


def test_a_variant_is_exported(tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from fa4core import attention
    from fa4core.compile import load, statistics
    from variants.sliding_window import sliding_window

    path = tmp_path / "window.fa4"
    found = run(
        "export", "variants.sliding_window", "--window", "9", "--head-dim", "64", "--seqlen", "40",
        "--emulated", "-o", str(path),
    )  # fmt: skip
    assert f"{path}: variants.sliding_window for sm100" in found.replace("\n", "")
    attend, compiled = load(path), statistics().compiled
    q, k, v = (torch.randn(1, 30, 2, 64).bfloat16() for _ in range(3))
    out = attend(q, k, v)
    assert statistics().compiled == compiled
    wanted = attention(q, k, v, sliding_window(window=9), backend="reference")
    torch.testing.assert_close(out.float(), wanted.float(), atol=0.02, rtol=0.02)


def test_what_can_not_be_exported_says_why(tmp_path):
    path = tmp_path / "a.fa4"
    refused = run("export", "variants.causal", "--dtype", "float32", "-o", str(path), code=1)
    assert "float32" in refused and not path.exists()
    assert "there is no folder" in run(
        "export", "variants.causal", "-o", str(tmp_path / "no" / "a.fa4"), code=2
    )
    assert "--output" in run("export", "variants.causal", code=2)
