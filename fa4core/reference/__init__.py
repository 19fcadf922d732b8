"""The definition of correctness.

`oracle` is dense and written for clarity; `tiled` interprets the very plan that kernels run, and
is what a CPU uses. Knows torch, the primitives and the plan; no kernel code.
"""
