"""Did a refactoring change any result? Two versions on one machine: parameters bit for bit, prices digit for digit.

    PYTHONPATH=OLD/src python bench/unchanged.py --write before.npz
    python bench/unchanged.py --against before.npz

Every method trains for twenty reproducible steps alone (bit for bit) and, where it stacks, in a stack (to rounding).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import vestige
from vestige.training import planning

STEPS, RATE = 20, 0.2
make_method = getattr(vestige, "make_method", None) or vestige.build  # as it was called until 0.2
PRICES = [
    "--sample-rate 0.04 --noise-multiplier 1.2222 --steps 6250 --delta 1e-5",
    "--sample-rate 0.04 --epsilon 3 --steps 6250 --delta 1e-5",
    "--sample-rate 0.01 --noise-multiplier 0.7 --steps 300 --delta 1e-7",
    "--method dpsur --trials 2914 --sample-rate 0.0170667 --sigma-t 3 --validation-rate 0.0042667 --sigma-v 1.37 "
    "--threshold -1.5 --delta 1e-5",
]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 14), nn.Tanh(), nn.Linear(14, 12), nn.Tanh(), nn.Linear(12, 4))


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(60, 12, generator=generator), torch.randint(4, (60,), generator=generator)


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def names() -> list[str]:
    listed = subprocess.run([sys.executable, "-c", COMMAND, "methods", "--json"], capture_output=True, check=True)
    return [name for row in json.loads(listed.stdout)["methods"] for name in (row["name"], *row.get("aliases", ()))]


COMMAND = """
try:
    from vestige.cli.main import main
except ImportError:
    from vestige.cli import main
main()
"""


def alone(name: str) -> np.ndarray:
    model = network()
    rate = 0.02 if "adam" in name else 0.5
    budget = {"epsilon": 30.0} if name.startswith("dpsgd-br") else {"noise_multiplier": 1.3}
    training = vestige.train(
        model, nn.functional.cross_entropy, examples(), method=name, sample_rate=RATE, steps=STEPS, delta=1e-3, lr=rate,
        reproducible=7, **budget,
    )  # fmt: skip
    for _ in training:
        pass
    return flat(model)


def settled(name: str) -> vestige.Method:
    """With what follows from the length of a run (bands of correlated noise), as a comparison settles it."""
    asked = planning.Request(sample_rate=RATE, steps=STEPS, delta=1e-3, noise_multiplier=1.3)
    return planning.settled(make_method(name), asked)


def stacked(found: list[str]) -> dict[str, np.ndarray]:
    """Every method that stacks, in one stack."""
    try:
        from vestige.compare.stacked import Stack, StackedRun, why_not
    except ImportError:
        from vestige.compare.stacked.learner import StackedRun
        from vestige.compare.stacked.stack import Stack, why_not
    loss = nn.functional.cross_entropy
    together = [name for name in found if why_not(network(), loss, make_method(name)) is None]
    runs = [StackedRun(network(), settled(name), 1.3, 0.02 if "adam" in name else 0.5, 7) for name in together]
    stack = Stack(runs, examples(), sample_rate=RATE, steps=STEPS, device=torch.device("cpu"))
    for _ in stack.train():
        pass
    return {name: flat(run.model) for name, run in zip(together, runs, strict=True)}


def prices() -> list[str]:
    """The numbers that `vestige account` prints: sentences about them may be reworded."""
    told = []
    for arguments in PRICES:
        line = [sys.executable, "-c", COMMAND, "account", *arguments.split(), "--json"]
        printed = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
        told.append(json.dumps({key: value for key, value in printed.items() if isinstance(value, int | float)}))
    return told


def measured() -> dict[str, np.ndarray]:
    found = names()
    results = {f"alone/{name}": alone(name) for name in found}
    results |= {f"stacked/{name}": value for name, value in stacked(found).items()}
    return {**results, "prices": np.array(prices())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="measure, and keep the results in this file")
    parser.add_argument("--against", type=Path, help="measure, and hold the results against this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measured()
    print(f"{vestige.__file__}: {len(results)} results")
    if arguments.write:
        np.savez(arguments.write, **results)
    if not arguments.against:
        return
    before, wrong = dict(np.load(arguments.against)), []
    for key, value in before.items():
        now = results.get(key)
        if now is None:
            wrong.append(f"{key}: gone")
        elif key.startswith("stacked/"):
            if not np.allclose(now, value, rtol=1e-4, atol=1e-5):
                wrong.append(f"{key}: differs by {np.abs(now - value).max():.2g}")
        elif not np.array_equal(now, value):
            wrong.append(f"{key}: {now if key == 'prices' else f'differs by {np.abs(now - value).max():.2g}'}")
    print("\n".join(wrong) or f"unchanged: {len(before)} results")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
