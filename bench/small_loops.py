"""What does following every operator cost a small model on a CPU? A private loop beside a plain one, in one process.

Times are the processor's, the best of five rounds of sixty steps (three of a recurrent network). To compare versions,
run it with each on PYTHONPATH.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import vestige

Data = tuple[Tensor, Tensor]


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    data: Data
    batch: int
    count: int = 60
    """Steps in a round."""


class Texts(nn.Module):
    """Words, a bidirectional recurrent network, and the mean over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, width), nn.Linear(2 * width, 2)
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(tokens))[0].mean(dim=1))


def layers(*sizes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))


def cases() -> dict[str, Case]:
    return {
        "8-8-2 [4]": Case(lambda: layers(8, 8, 2), (torch.randn(64, 8), torch.randint(2, (64,))), 4),
        "digits MLP 64-64-10 [37]": Case(
            lambda: layers(64, 64, 10), (torch.randn(740, 64), torch.randint(10, (740,))), 37
        ),
        "BiLSTM 2 x 64, 63 words [32]": Case(
            lambda: Texts(64), (torch.randint(1000, (320, 63)), torch.randint(2, (320,))), 32, count=3
        ),
    }


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


def milliseconds(running: Iterator[None], count: int, rounds: int = 5) -> float:
    taken = []
    for _ in range(count // 2):
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
    for name, case in cases().items():
        plain, private = (
            milliseconds(steps(case.model(), case.data, case.batch, private), case.count) for private in (False, True)
        )
        print(f"| {name} | {plain:.2f} ms | {private:.2f} ms | {private / plain:.1f}x |")


if __name__ == "__main__":
    main()
