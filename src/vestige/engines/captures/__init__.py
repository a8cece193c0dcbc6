"""Passes that are recorded while they are proved, and replayed."""
