"""Per-example gradients, clipped and summed: a reference engine, and a fast one that gives the same answers."""
