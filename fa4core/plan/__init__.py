"""From a variant and a problem to a plan: tiles, resources, schedule, cost, explanation.

Knows the primitives and the numbers of the targets; no kernel code.
"""
