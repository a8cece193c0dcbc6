"""What is done with releases? Where to ask, what to remember, how to update, what to keep: none of it sees data."""
