"""What is done with releases: where to ask next, what to remember, how to move, what to keep. None of it sees data."""
