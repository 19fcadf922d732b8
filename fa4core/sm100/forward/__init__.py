"""The forward pass: one file per warp role, and the declaration they share."""
