"""Other libraries' ways in: transformers' Trainer, sentence-transformers."""
