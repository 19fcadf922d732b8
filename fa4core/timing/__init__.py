"""A cycle-level replay of a kernel's machine code, driven by what the emulator saw it do.

It knows instructions, units and barriers, and nothing of attention; `fa4core.timing.problem` is
where work tiles and FLOP come in. Every time that comes out of here is modelled, not measured.
"""
