"""Prebuilt variants."""
