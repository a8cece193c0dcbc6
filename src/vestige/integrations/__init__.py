"""Adapters to other libraries. Each needs its own package, installed as an extra."""
