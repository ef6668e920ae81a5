"""Run models over the sample: hooks, precision, memory, layer-by-layer passes, statistics, losses, processes."""
