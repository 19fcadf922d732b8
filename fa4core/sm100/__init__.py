"""Kernels for Blackwell (SM100, SM103) in CuTe DSL. Importing it does not import the DSL."""
