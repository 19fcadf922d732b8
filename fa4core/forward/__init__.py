"""What the forward kernels of all targets share: the plan of work tiles as roles read it, mods,
and what a kernel is compiled for. Roles are in `fa4core.sm100.forward` and `fa4core.sm90.forward`.
"""
