"""Which weights need no private data? Those of networks trained on images that procedures made."""
