"""Building the native core: what happens without a compiler, and that one build is shared."""

from __future__ import annotations

import pytest

from fa4core.emulator import native


def test_no_compiler_is_explained(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(native.CompilerMissing, match="apt install g"):
        native.compiler()


def test_compiler_can_be_named(monkeypatch):
    monkeypatch.setenv("CXX", "ccache clang++-18")
    assert native.compiler() == ["ccache", "clang++-18"]


def test_a_failing_build_shows_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"does not compile[\s\S]*false -std"):
        native.build()
    assert not list(tmp_path.rglob("*.so"))


def test_the_build_is_reused():
    try:
        first = native.build()
    except native.CompilerMissing:
        pytest.skip("no C++ compiler")
    stamp = first.stat().st_mtime_ns
    assert native.build() == first
    assert first.stat().st_mtime_ns == stamp
