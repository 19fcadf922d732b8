"""What a forward kernel is compiled for."""

from __future__ import annotations

import attrs

from fa4core.sm100.forward.spec import Spec


def test_its_text_is_an_identifier_that_tells_specs_apart() -> None:
    """The DSL puts it into the kernel's name: any constant of a mod must do, 1e+08 too."""
    spec = Spec("(add (var score) (const 1e+08))", "bfloat16", 64, 64)
    other = attrs.evolve(spec, head_dim=72)
    assert str(spec).isidentifier()
    assert str(spec) == str(attrs.evolve(spec)) != str(other)
