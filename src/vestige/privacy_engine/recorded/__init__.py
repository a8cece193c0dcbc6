"""Passes of the user's that are recorded ahead on a GPU, and replayed."""
