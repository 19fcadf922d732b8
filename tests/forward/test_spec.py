"""What a forward kernel is compiled for."""

from __future__ import annotations

import attrs
import pytest

from fa4core.forward.spec import ForwardSpec
from fa4core.sm90.forward.spec import Spec as Hopper
from fa4core.sm90.forward.tuning import Shape
from fa4core.sm100.forward.spec import Spec as Blackwell

GRAPH = "(add (var score) (const 1e+08))"


@pytest.mark.parametrize(
    "spec",
    [
        Blackwell(GRAPH, "bfloat16", 64, 64),
        Hopper(GRAPH, "bfloat16", 64, 64, Shape(2, 128)),
    ],
)
def test_its_text_is_an_identifier_that_tells_specs_apart(spec: ForwardSpec) -> None:
    """The DSL puts it into the kernel's name: any constant of a mod must do, 1e+08 too."""
    other = attrs.evolve(spec, head_dim=72)
    assert str(spec).isidentifier()
    assert str(spec) == str(attrs.evolve(spec)) != str(other)
