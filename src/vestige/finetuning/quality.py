"""How good is a fine-tuned model? Its accuracy or its perplexity on public texts: the private ones are not asked."""

from __future__ import annotations

from math import exp

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from vestige.finetuning.texts import Texts
from vestige.mechanism.losses.model_losses import IGNORED

AT_ONCE = 32


@torch.no_grad()
def judged(model: nn.Module, texts: Texts) -> dict[str, float]:
    """`accuracy` where texts are told apart; `perplexity`, of all tokens together, where they are continued."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    right, nats, tokens = 0, 0.0, 0
    for batch in DataLoader(texts, batch_size=AT_ONCE):
        labels = batch.pop("labels").to(device)
        logits = model(**{name: value.to(device) for name, value in batch.items()}).logits.float()
        if texts.classes is not None:
            right += int((logits.argmax(dim=-1) == labels).sum())
        else:
            after = labels[:, 1:]
            nats += float(F.cross_entropy(logits[:, :-1].flatten(0, 1), after.flatten(), reduction="sum"))
            tokens += int((after != IGNORED).sum())
    model.train(training)
    if texts.classes is not None:
        return {"accuracy": right / len(texts)}
    return {"perplexity": exp(min(nats / max(1, tokens), 700.0))}
