"""Latency as a constraint, measured on the user's own model, device and input shape."""
