"""What the backward kernels of all targets share: the plan of work tiles, padded tensors, the
kernels before and after the main one, and derivatives of mods. Roles are in the targets' folders.
"""
