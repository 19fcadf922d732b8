"""The caches of compiled kernels, with a compiler that only counts."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import pytest
import torch

from fa4core.compile import build, cache, disk
from fa4core.compile import kernel as kernels
from fa4core.compile.kernel import Kernel, TensorType, type_of
from fa4core.compile.package import DamagedError, Package


@attrs.frozen
class Size:
    rows: int = 1
    label: str = "a"


def a_kernel(**changes) -> Kernel:
    described = {"function": "module:name", "arguments": (TensorType("float32", 2), "int32")}
    return Kernel(**({**described, "spec": Size(), "target": "sm100"} | changes))


def made(kernel: Kernel) -> Package:
    return Package(kernel.key, kernel.target, kernel.emulated, b"host" * 50, "ptx", b"cubin" * 50)


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list[Kernel]:
    """What was compiled; caches empty at first."""
    seen: list[Kernel] = []

    def count(kernel: Kernel) -> Package:
        seen.append(kernel)
        return made(kernel)

    monkeypatch.setattr(build, "build", count)
    monkeypatch.setattr(cache, "_packages", type(cache._packages)())
    monkeypatch.setenv(disk.VARIABLE, str(tmp_path / "kernels"))
    return seen


def entry() -> os.PathLike:
    (place,) = disk.folder().iterdir()
    return place


# ------------------------------------------------------------------------------------ the key


def test_every_part_of_a_kernel_is_in_its_key():
    changed = [
        a_kernel(function="module:other"),
        a_kernel(arguments=(TensorType("float16", 2), "int32")),
        a_kernel(arguments=(TensorType("float32", 3), "int32")),
        a_kernel(arguments=(TensorType("float32", 2, align=4), "int32")),
        a_kernel(arguments=(TensorType("float32", 2), "float32")),
        a_kernel(spec=Size(rows=2)),
        a_kernel(spec=Size(label="b")),
        a_kernel(target="sm103"),
        a_kernel(emulated=True),
    ]
    keys = {k.key for k in (a_kernel(), *changed)}
    assert len(keys) == len(changed) + 1
    assert len({k.digest for k in (a_kernel(), *changed)}) == len(changed) + 1


def test_every_field_of_the_forward_spec_is_in_the_key():
    from fa4core.sm100.forward.spec import Spec

    spec = Spec(graph="", dtype="bfloat16", head_dim=64, head_dim_v=64)
    key = a_kernel(spec=spec).key
    assert all(f'"{field.name}"' in key for field in attrs.fields(Spec))


@pytest.mark.parametrize("value", [torch.zeros(1), lambda: 0, object()])
def test_neither_tensors_nor_functions_get_into_a_key(value):
    with pytest.raises(TypeError, match="pass tensors and functions as run-time arguments"):
        _ = a_kernel(spec=Size(label=value)).key


def test_types_of_arguments_do_not_tell_values():
    a, b = torch.zeros(3, 5), torch.ones(200, 1)
    assert type_of(a) == type_of(b) == TensorType("float32", 2)
    assert type_of((a.half(),)) == (TensorType("float16", 2, align=2),)
    assert type_of(1.0) == type_of(0.5) != type_of(1)


def test_code_and_toolchain_are_in_the_digest(monkeypatch):
    before = a_kernel().digest
    monkeypatch.setattr(kernels.metadata, "version", lambda name: "0")
    other_toolchain = a_kernel().digest
    monkeypatch.undo()
    assert a_kernel().digest == before
    monkeypatch.setattr(kernels, "sources", lambda: "other code")
    assert len({before, other_toolchain, a_kernel().digest}) == 3


def test_changed_code_has_another_digest(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "_SOURCES", (tmp_path,))
    (tmp_path / "a.py").write_text("x = 1")
    before = kernels.sources.__wrapped__()
    (tmp_path / "a.py").write_text("x = 2")
    assert kernels.sources.__wrapped__() != before


# --------------------------------------------------------------------------------- the caches


def test_a_kernel_is_compiled_once_in_a_process(compiled):
    before = cache.statistics()
    first, second = cache.obtain(a_kernel()), cache.obtain(a_kernel())
    assert first is second and len(compiled) == 1
    after = cache.statistics()
    assert (after.compiled - before.compiled, after.reused - before.reused) == (1, 1)


def test_a_kernel_on_disk_is_not_compiled(compiled):
    cache.obtain(a_kernel())
    cache.clear()
    found = cache.obtain(a_kernel())
    assert len(compiled) == 1 and found.host == made(a_kernel()).host
    cache.obtain(a_kernel(target="sm103"))
    assert len(compiled) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "text", "other"])
def test_a_bad_entry_is_compiled_anew_and_replaced(compiled, damage):
    cache.obtain(a_kernel())
    data = bytearray(entry().read_bytes())
    if damage == "flipped":
        data[len(data) // 3] ^= 0xFF
    bad = {
        "cut": data[: len(data) // 2],
        "empty": b"",
        "flipped": data,
        "text": b"not a package",
        "other": made(a_kernel(target="sm103")).to_bytes(),
    }[damage]
    entry().write_bytes(bad)
    repaired = cache.statistics().repaired
    cache.clear()
    assert cache.obtain(a_kernel()).host == made(a_kernel()).host
    assert len(compiled) == 2 and cache.statistics().repaired == repaired + 1
    cache.clear()
    cache.obtain(a_kernel())
    assert len(compiled) == 2


def test_the_disk_can_be_left_out(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv(disk.VARIABLE, disk.OFF)
    cache.obtain(a_kernel())
    cache.clear()
    cache.obtain(a_kernel())
    assert len(compiled) == 2 and not list(tmp_path.iterdir())


def test_the_default_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv(disk.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.folder() == tmp_path / "fa4core" / "kernels"


def test_a_folder_that_can_not_be_written_is_a_warning(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk.VARIABLE, str(tmp_path / "file" / "kernels"))
    with pytest.warns(UserWarning, match=f"{disk.VARIABLE} to a folder that can be written"):
        assert cache.obtain(a_kernel()).ptx == "ptx"


def test_the_folder_keeps_what_was_used_last(compiled, monkeypatch):
    folder, names = disk.folder(), "abc"
    for label in reversed(names):
        cache.obtain(a_kernel(spec=Size(label=label)))
    for age, label in enumerate(names):  # a is the oldest
        entry_of = disk._place(a_kernel(spec=Size(label=label)))
        os.utime(entry_of, (1000 + age, 1000 + age))
    size = entry_of.stat().st_size
    abandoned, other = folder / ".writing-old", folder / "notes.txt"
    for file in (abandoned, other):
        file.write_bytes(b"x" * size)
        os.utime(file, (0, 0))
    (folder / ".writing-now").touch()
    cache.clear()
    cache.obtain(a_kernel(spec=Size(label="a")))  # read: now b is the oldest
    monkeypatch.setenv("FA4CORE_CACHE_MB", str(3.5 * size / 1e6))
    cache.obtain(a_kernel(spec=Size(label="d")))
    cache.clear()
    compiled.clear()
    for label in "dcab":
        cache.obtain(a_kernel(spec=Size(label=label)))
    assert [kernel.spec.label for kernel in compiled] == ["b"]
    assert not abandoned.exists() and other.exists() and (folder / ".writing-now").exists()


def test_the_entry_that_is_written_stays_however_little_room_there_is(compiled, monkeypatch):
    monkeypatch.setenv("FA4CORE_CACHE_MB", "0")
    for label in "ab":
        cache.obtain(a_kernel(spec=Size(label=label)))
    assert len(list(disk.folder().glob("*.zip"))) == 1
    cache.clear()
    cache.obtain(a_kernel(spec=Size(label="b")))
    assert len(compiled) == 2


def test_a_limit_that_is_no_number_is_refused(compiled, monkeypatch):
    monkeypatch.setenv("FA4CORE_CACHE_MB", "many")
    with pytest.raises(ValueError, match="FA4CORE_CACHE_MB='many'; megabytes"):
        cache.obtain(a_kernel())


def test_memory_holds_so_many_kernels(compiled, monkeypatch):
    monkeypatch.setattr(cache, "MOST", 2)
    for rows in (1, 2, 1, 3):  # the last pushes out rows=2, which was not used lately
        cache.obtain(a_kernel(spec=Size(rows)))
    kept = {k.split('"rows": ')[1][0] for k in cache._packages}
    assert kept == {"1", "3"}


_WRITER = """
from test_kernel_cache import a_kernel, made
from fa4core.compile import disk
for _ in range(200):
    disk.write(a_kernel(), made(a_kernel()))
    assert disk.read(a_kernel()).host == made(a_kernel()).host
"""


def test_processes_that_write_one_entry_never_see_half_of_it(compiled):
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, *sys.path])
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER], env={**os.environ, "PYTHONPATH": path})
        for _ in range(3)
    ]
    assert [w.wait() for w in writers] == [0, 0, 0]
    assert disk.read(a_kernel()) is not None
    assert entry().suffix == ".zip"  # and nothing else is left


def test_a_package_survives_its_bytes():
    package = made(a_kernel(emulated=True))
    again = Package.from_bytes(package.to_bytes())
    assert all(getattr(again, f.name) == getattr(package, f.name) for f in attrs.fields(Package))
    with pytest.raises(DamagedError, match="no compiled kernel"):
        Package.from_bytes(b"")
