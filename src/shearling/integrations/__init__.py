"""Integrations with transformers' Trainer and sentence-transformers."""
