"""Asking the data: sampling, clipping, noise, and the curator, the one place that holds examples."""
