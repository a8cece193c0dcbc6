"""Which axis of a tensor counts the examples? Labels, one rule per operator, and what must be seen before it."""
