"""The random half of the mechanism: who is asked, and which noise falls. Keys, samples, noise and releases."""
