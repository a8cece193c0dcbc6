"""Can a model be watched? It is tried on made-up examples, once."""
