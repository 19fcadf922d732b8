"""The backward's main kernel for Blackwell: one file for each warp role."""
