"""Other libraries: where their users look, we speak their language. Each needs its own package, as an extra."""
