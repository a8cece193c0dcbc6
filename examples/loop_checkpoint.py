"""Your own loop in two processes: a ledger says what was asked, a checkpoint holds the model."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige

EPOCHS = 4

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))


def train(epochs: int, resume: bool) -> float:
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    engine = vestige.PrivacyEngine(ledger="ledger.jsonl", resume=resume)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=180),
        target_epsilon=3, target_delta=1e-5, epochs=EPOCHS, max_grad_norm=1.0,
    )  # fmt: skip
    if resume:
        engine.load_checkpoint(path="checkpoint.pt", module=model, optimizer=optimizer)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    engine.save_checkpoint(path="checkpoint.pt", module=model, optimizer=optimizer)
    return engine.get_epsilon(delta=1e-5)


print(f"first half: epsilon {train(EPOCHS // 2, resume=False):.2f}")
print(f"both: epsilon {train(EPOCHS // 2, resume=True):.2f}")
