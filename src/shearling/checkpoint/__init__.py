"""Pruned models on disk: written atomically, loaded like any other model."""
