"""What do layers remember, each by the spectrum of its own weights? The memory of SMA-DP-SGD; it sees releases only."""
