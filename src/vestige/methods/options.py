"""What do the methods' common options mean? Their types, with the words that `--help` shows."""

from typing import Annotated

Bound = Annotated[float, "largest norm of one example's gradient (C)"]
Momentum = Annotated[float, "heavy-ball momentum of the optimizer"]
