"""Architectures: which modules they have, and how to shrink them."""
