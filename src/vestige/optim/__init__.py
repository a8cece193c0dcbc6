"""What is done with releases: where to ask, what to remember, how to move, whether to keep a move. None of it sees data."""
