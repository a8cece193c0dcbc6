"""What does random allocation cost beside Poisson sampling, and how long does that take to find out?

`python bench/allocation.py` prints the table of docs/sampling.md; `--other` adds the bounds of PLD_accounting, where
that is installed (minutes).
"""

from __future__ import annotations

import argparse
import time

from vestige import accounting
from vestige.priced_questions import AllocatedGaussian, SampledGaussian

DELTA = 1e-5
SETTINGS = ((98, 3, 0.5155), (98, 3, 1.0334), (49, 10, 0.6582), (49, 30, 0.7987), (12, 75, 1.6840), (25, 250, 2.0355))
"""Steps an epoch, epochs, noise multiplier."""


def row(steps: int, epochs: int, multiplier: float, other: bool) -> str:
    poisson = accounting.epsilon({SampledGaussian(1 / steps, multiplier): steps * epochs}, DELTA)
    begin = time.perf_counter()
    allocated = accounting.epsilon({AllocatedGaussian(steps, multiplier): epochs}, DELTA)
    seconds = time.perf_counter() - begin
    found = f"| {steps} | {epochs} | {multiplier:.4f} | {poisson:.4g} | {allocated:.4g} | {seconds:.1f} |"
    if not other:
        return found
    from PLD_accounting import gaussian_allocation_epsilon_range

    begin = time.perf_counter()
    high, low = gaussian_allocation_epsilon_range(
        delta=DELTA, sigma=multiplier, num_steps=steps, num_selected=1, num_epochs=epochs
    )
    return f"{found} {low:.4g} to {high:.4g} | {time.perf_counter() - begin:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", action="store_true", help="also ask PLD_accounting")
    other = parser.parse_args().other
    print(
        "| steps an epoch | epochs | noise multiplier | Poisson | allocation | s |" + (" other | s |" if other else "")
    )
    print("|---|---|---|---|---|---|" + ("---|---|" if other else ""))
    for setting in SETTINGS:
        print(row(*setting, other), flush=True)


if __name__ == "__main__":
    main()
