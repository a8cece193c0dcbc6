"""Asking the data: sampling, clipping, noise, and the curator, the only object that holds examples."""
