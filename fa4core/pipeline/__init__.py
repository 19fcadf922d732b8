"""The vocabulary of warp-specialised pipelines: roles, signals, regions, and their checker.

Plain values and plain Python, except `device`, which emits CuTe DSL. It knows no kernel.
"""
