"""What shearling knows of architectures: which modules there are, and how to narrow them."""
