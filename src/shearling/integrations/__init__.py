"""Entry points from other libraries: transformers' Trainer, sentence-transformers."""
