"""Kernels for Hopper (SM90): TMA, wgmma, warp-specialised producer and consumer warpgroups."""
