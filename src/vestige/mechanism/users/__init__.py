"""Users: who owns which row, how many rows of one take part, and how the rows of one are clipped once."""
