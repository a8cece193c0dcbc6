"""A run that is interrupted and goes on: what was asked stays charged, and the budget holds over both parts."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import vestige

STEPS = 100

digits = load_digits()
data = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def run(resume: bool) -> vestige.Training:
    """The same call starts a run and continues it: nothing but `resume` may change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return vestige.train(
        model, nn.functional.cross_entropy, data, method="dp-sgd",
        epsilon=3, delta=1e-5, sample_rate=0.1, steps=STEPS, out="my-resumed-run", resume=resume,
    )  # fmt: skip


for record in run(resume=False):
    if record.step == STEPS // 2:
        break  # Ctrl-C, a full disk or a power cut do as well: the ledger is written before each answer
print(f"interrupted after step {record.step} at epsilon {record.epsilon:.2f}")

training = run(resume=True)
steps = [record.step for record in training]
print(f"continued from step {steps[0]} to {steps[-1]}: epsilon {training.guarantee().epsilon:.2f}")
