"""The same small model, privately, with Opacus or with Vestige: only the import and the method's name change.

usage: python examples/opacus_or_vestige.py [opacus|vestige]
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

library = sys.argv[1] if len(sys.argv) > 1 else "vestige"
if library == "opacus":
    from opacus import PrivacyEngine

    extra = {}
else:
    from vestige import PrivacyEngine

    extra = {"method": "fo-dp-sgd"}

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = (images[297:], labels[297:]), (images[:297], labels[:297])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(*train), batch_size=150)

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=3.0,
    target_delta=1e-5,
    epochs=20,
    max_grad_norm=1.0,
    **extra,
)
for _ in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

accuracy = (model.eval()(test[0]).argmax(1) == test[1]).float().mean().item()
print(f"{library}: accuracy {accuracy:.1%} at epsilon {engine.get_epsilon(delta=1e-5):.2f}")
