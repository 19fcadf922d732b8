"""Executes the PTX that CuTe DSL emits on a CPU, with hostile but legal orders and detectors."""
