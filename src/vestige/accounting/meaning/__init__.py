"""What an epsilon means for an attacker: upper bounds, from the same loss distributions."""
