"""The static report: what a kernel is before it runs.

Counts are read out of machine code (`figures`), cycles are modelled from them (`model`); both are
shown beside the paper's roofline and, on request, beside a peer's kernel. Used by the command line.
"""
