"""Time as a constraint: measured on the user's own layers, device and shape."""
