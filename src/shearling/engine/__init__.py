"""Run models over the sample: hooks, precision, memory, layer by layer, sums, losses, several processes."""
