"""Other libraries' ways in: transformers' Trainer."""
