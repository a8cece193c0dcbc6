"""The `vestige` command."""
