"""What does following every operator cost a small model on a CPU? A private loop beside a plain one, in one process.

Times are the processor's, the best of five rounds of sixty steps. To compare versions, run it with each on PYTHONPATH.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import vestige

MODELS = {"8-8-2 [4]": ((8, 8, 2), 64, 4), "digits MLP 64-64-10 [37]": ((64, 64, 10), 740, 37)}
Data = tuple[Tensor, Tensor]


def model_of(sizes: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))


def steps(model: nn.Module, data: Data, batch: int, private: bool) -> Iterator[None]:
    """Training steps without an end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data), batch_size=batch, shuffle=not private)
    if private:
        model, optimizer, loader = vestige.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def milliseconds(make: Callable[[], Iterator[None]], warm: int = 30, rounds: int = 5, count: int = 60) -> float:
    running, taken = make(), []
    for _ in range(warm):
        next(running)
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(count):
            next(running)
        taken.append((time.process_time() - start) / count * 1e3)
    return min(taken)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| model [batch] | plain | private loop | ratio |\n|---|---|---|---|")
    for name, (sizes, rows, batch) in MODELS.items():
        data = torch.randn(rows, sizes[0]), torch.randint(sizes[2], (rows,))
        plain, private = (
            milliseconds(lambda p=p, s=sizes, d=data, b=batch: steps(model_of(s), d, b, p)) for p in (False, True)
        )
        print(f"| {name} | {plain:.2f} ms | {private:.2f} ms | {private / plain:.1f}x |")


if __name__ == "__main__":
    main()
