"""Which features need no training here? Those that do not depend on private rows: wavelets, and frozen encoders."""
