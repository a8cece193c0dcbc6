"""A LightningModule that knows nothing of privacy, trained privately by a callback.

usage: python examples/lightning_fit.py
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige.integrations.lightning import Private


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[297:], labels[297:]), batch_size=150)
public = DataLoader(TensorDataset(images[:297], labels[:297]), batch_size=297)

private = Private(target_epsilon=3.0, target_delta=1e-5, max_grad_norm=1.0)
trainer = pl.Trainer(
    max_epochs=10, callbacks=[private], logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Digits(), train, public)
print(f"accuracy {trainer.callback_metrics['accuracy']:.1%} at epsilon {private.guarantee().epsilon:.2f}")
