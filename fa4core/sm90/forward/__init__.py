"""The forward kernel, one file for each role."""
