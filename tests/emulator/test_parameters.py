"""Sizes of kernel parameters, read from PTX entries."""

from __future__ import annotations

from fa4core.emulator.host.parameters import parameter_sizes

PTX = """
.version 8.8
.target sm_100a
.visible .entry first(
	.param .align 64 .b8 first_param_0[128],
	.param .u32 first_param_1,
	.param .u64 .ptr .align 16 first_param_2,
	.param .f32 first_param_3
)
.reqntid 128, 1, 1
{ ret; }
.visible .entry second()
{ ret; }
.entry third(.param .b8 third_param_0)
{ ret; }
"""


def test_sizes_in_order():
    sizes = parameter_sizes(PTX)
    assert sizes["first"] == (128, 4, 8, 4)
    assert sizes["second"] == ()
    assert sizes["third"] == (1,)
