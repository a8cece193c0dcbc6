"""One call: a model, a loss, data and an epsilon. The folder holds the ledger, and the run is verified from it."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import vestige
from vestige.training.verify import verify

STEPS = 200

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = (images[297:], labels[297:]), (images[:297], labels[:297])  # the test set is public

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
training = vestige.train(
    model, nn.functional.cross_entropy, train,
    epsilon=3, delta=1e-5, batch_size=150, steps=STEPS, out="my-run",
)  # fmt: skip
print(f"noise multiplier {training.plan.noise_multiplier:.2f}, learning rate {training.plan.lr:.3f}")
for record in training:  # each turn is one private step
    if record.step % 50 == 0:
        print(f"step {record.step}: epsilon {record.epsilon:.2f}")

print(f"accuracy {vestige.accuracy(model, test):.1%}, {training.guarantee()}")
print(f"from the ledger alone: epsilon {verify('my-run').guarantee.epsilon:.2f}")
