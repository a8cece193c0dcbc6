"""Operators of our own, and losses that run as one."""
