"""Which optimizers are there besides torch's? They see releases only: what they do with them is post-processing."""
