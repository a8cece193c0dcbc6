"""One self-contained page about a comparison, made from its records alone."""
