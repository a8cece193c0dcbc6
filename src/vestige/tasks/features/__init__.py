"""Which features need no training here? Those that nobody's rows were asked for: wavelets, and frozen encoders."""
