"""How does a step shed its launches on a GPU? It is recorded once, and replayed."""
