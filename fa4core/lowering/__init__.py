"""What an expression graph becomes: torch code, interval bounds, kernel code."""
