"""Which weights saw nobody? Those of networks trained on images that procedures made."""
