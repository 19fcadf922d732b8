"""The prebuilt variants: each builds, keeps its key, is right, and draws itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import attrs
import pytest
import torch

import variants
from fa4core import Variant
from fa4core.testing import Shape, assert_variant_correct, check_tile_map

#: Lengths, heads and head dims that a variant without tables of its own runs on.
SMALL = (
    Shape((65, 130), (65, 130), 4, 2, 40, 40),
    Shape((70,), (150,), 4, 4, 64, 32),
    Shape((1, 0), (129, 3), 4, 1, 16, 16),
)


@attrs.frozen
class Prebuilt:
    """How a variant is tested: its factory, and shapes that its tables fit."""

    make: Callable[[], Variant]
    shapes: tuple[Shape, ...] = SMALL


def square(seqlen: int) -> tuple[Shape, ...]:
    return (Shape((seqlen, seqlen), (seqlen, seqlen), 4, 2, 24, 24),)


PREBUILT = {
    "full": Prebuilt(variants.full),
    "causal": Prebuilt(variants.causal),
    "sliding_window": Prebuilt(lambda: variants.sliding_window(window=33, sink_tokens=2)),
    "prefix_lm": Prebuilt(lambda: variants.prefix_lm(prefix=torch.tensor([40, 7]))),
    "document": Prebuilt(lambda: variants.document(documents=5, seqlen=190), square(190)),
    "alibi": Prebuilt(lambda: variants.alibi(torch.rand(4).requires_grad_())),
    "softcap": Prebuilt(lambda: variants.softcap(cap=3.0, window=50)),
    "sink": Prebuilt(lambda: variants.sink(torch.randn(4).requires_grad_(), window=20)),
    "natten": Prebuilt(lambda: variants.natten(12, 15, kernel=5, dilation=2), square(180)),
    "block_diffusion": Prebuilt(lambda: variants.block_diffusion(block=16), square(192)),
    "block_sparse": Prebuilt(
        lambda: variants.block_sparse(seqlen=256, heads=4, top_k=2, block=32), square(256)
    ),
    "mla": Prebuilt(variants.mla, (Shape((130,), (130,), 2, 2, 192, 128),)),
}
NAMES = [m.name for m in pkgutil.iter_modules(variants.__path__) if m.name != "flex"]


def test_every_variant_is_tested() -> None:
    assert sorted(PREBUILT) == sorted(NAMES) == sorted(variants.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_builds_from_its_defaults_with_a_stable_key(name: str) -> None:
    factory = getattr(variants, name)
    first, again = factory(), factory()
    assert isinstance(first, Variant)
    assert first.key == again.key


@pytest.mark.parametrize("name", NAMES)
def test_is_right(name: str) -> None:
    chosen = PREBUILT[name]
    assert_variant_correct(chosen.make(), shapes=chosen.shapes)


@pytest.mark.parametrize("name", NAMES)
def test_draws_itself(name: str, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"variants.{name}")
    module.main()
    (picture,) = tmp_path.iterdir()
    assert picture.name == f"{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_can_be_given_on_a_command_line(name: str) -> None:
    """Every parameter has a default and a type, so that the command line can offer it."""
    for parameter in inspect.signature(getattr(variants, name)).parameters.values():
        assert parameter.default is not parameter.empty
        assert parameter.annotation is not parameter.empty


def test_new_numbers_compile_nothing() -> None:
    assert variants.sliding_window(8).key == variants.sliding_window(4096).key
    assert variants.prefix_lm(3).key == variants.prefix_lm(5).key
    assert variants.document(documents=3).key == variants.document(documents=9, seed=4).key
    assert variants.sink(heads=4).key == variants.sink(heads=8, window=5).key


def test_tile_maps_skip_what_they_should() -> None:
    """Shares of tiles that need work, which follow from the definitions."""
    documents = variants.document(torch.tensor([0, 512, 1024]), causal=False)
    counts = check_tile_map(documents, seqlens_q=[1024], seqlens_k=[1024])
    assert counts.sound and counts.left_open == 0


def test_routing_takes_the_own_block_and_the_best_past_ones() -> None:
    q = torch.zeros(1, 128, 1, 4)
    k = torch.zeros(1, 128, 1, 4)
    q[:, 96:, :, 0] = 1.0  # the last of four blocks looks along axis 0,
    k[:, 32:64, :, 0] = 2.0  # where the keys of block 1 are
    from variants.block_sparse import route

    chosen = route(q, k, top_k=2, block=32)
    assert chosen.shape == (1, 1, 4, 2)
    assert set(chosen[0, 0, 3].tolist()) == {3, 1}
    assert set(chosen[0, 0, 0].tolist()) == {0, -1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: variants.document(documents=0), "1 to 8192 documents"),
        (lambda: variants.block_sparse(seqlen=100, block=64), "multiple of block"),
        (lambda: variants.sliding_window(-1), "left"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], Variant], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
