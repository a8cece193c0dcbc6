"""Private optimizers that remember: differentially private training for PyTorch."""
