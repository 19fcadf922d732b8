"""The backward's main kernel, one file for each role."""
