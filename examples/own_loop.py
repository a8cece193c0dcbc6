"""Your own training loop, made private: give epsilon, and stop when it is spent."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige

EPOCHS = 20

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = TensorDataset(images[297:], labels[297:]), (images[:297], labels[:297])  # the test set is public

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine = vestige.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=DataLoader(train, batch_size=150),
    target_epsilon=3, target_delta=1e-5, epochs=EPOCHS, max_grad_norm=1.0,
)  # fmt: skip
criterion = engine.criterion(nn.CrossEntropyLoss())  # each example's own loss, over a public divisor

for _ in range(EPOCHS):
    for x, y in loader:  # a Poisson sample: its size varies
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    # Print what is public or paid for: epsilon, accuracy on public data. Not the training loss.
    print(f"epsilon {engine.get_epsilon(delta=1e-5):.2f}, accuracy {vestige.accuracy(model, test):.1%}")

print(engine.guarantee(delta=1e-5))
