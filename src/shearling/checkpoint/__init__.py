"""Pruned models on disk: written whole or not at all, loaded like any other."""
