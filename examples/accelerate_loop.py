"""A loop under Accelerate, privately: make_private before `prepare`, or after it.

usage: python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = TensorDataset(images[297:], labels[297:]), (images[:297], labels[:297])

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(train, batch_size=150, shuffle=True)

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
engine = vestige.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, method="fo-dp-sgd",
    target_epsilon=3.0, target_delta=1e-5, epochs=10, max_grad_norm=1.0, max_physical_batch_size=64,
)  # fmt: skip
for _ in range(10):
    for x, y in loader:  # parts of at most 64 of each sample; the step after its last part moves
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

accuracy = (model.eval()(test[0].to(accelerator.device)).argmax(1).cpu() == test[1]).float().mean().item()
print(f"accuracy {accuracy:.1%} at epsilon {engine.get_epsilon(delta=1e-5):.2f}")
