"""What do samples cost that are not Poisson ones? One file for each way of drawing them."""
