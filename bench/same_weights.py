"""Did a change of names change anything else? Weights of reproducible runs, as hashes to hold against another version.

    PYTHONPATH=src python bench/same_weights.py > now.txt
    git worktree add ../before REVISION && PYTHONPATH=../before/src python bench/same_weights.py > before.txt
    diff before.txt now.txt

It names methods, and no argument that was renamed, so that it runs with the version before and after. Also a loop of
one's own, and what a run's ledger says of its first row.
"""

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from vestige.methods.registry import METHODS

ROWS, STEPS = 200, 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.rand(ROWS, 1, 8, 8, generator=random), torch.randint(10, (ROWS,), generator=random)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def trained(method: str, folder: Path) -> str:
    model = network()
    budget = {"epsilon": 8.0} if method in ("dpsgd-br", "dpsgd-br-stepped") else {"noise_multiplier": 1.0}
    settings = {"sample_rate": 0.2, "steps": STEPS, "delta": 1e-4, "lr": 0.1, "reproducible": 7, "out": folder}
    for _ in vestige.train(model, F.cross_entropy, data(), method=method, **budget, **settings):
        pass
    opened = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
    return f"{digest(model)} {json.dumps(opened['method'], sort_keys=True)}"


def looped() -> str:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = vestige.PrivacyEngine(reproducible=7)
    loader = DataLoader(TensorDataset(*data()), batch_size=40)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return digest(model)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("loop", looped())
    for method in sys.argv[1:] or METHODS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(method, trained(method, Path(folder) / "run"), flush=True)
            except ValueError as problem:
                print(method, "refused:", problem, flush=True)


if __name__ == "__main__":
    main()
