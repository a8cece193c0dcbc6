"""How good is a fine-tuned model? Its accuracy or its perplexity on public texts: the private ones are not asked."""

from __future__ import annotations

from math import exp

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

from vestige.finetuning.texts import Texts
from vestige.mechanism.losses.model_losses import IGNORED
from vestige.processes.group import ALONE, Processes

AT_ONCE = 32


@torch.no_grad()
def judged(model: nn.Module, texts: Texts, group: Processes = ALONE) -> dict[str, float]:
    """`accuracy` where texts are told apart; `perplexity`, of all tokens together, where they are continued.
    Together: each process judges its own of the texts, and all say the same."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    right, nats, tokens = 0, 0.0, 0
    own = Subset(texts, range(group.rank, len(texts), group.size))
    for batch in DataLoader(own, batch_size=AT_ONCE):
        labels = batch.pop("labels").to(device)
        logits = model(**{name: value.to(device) for name, value in batch.items()}).logits.float()
        if texts.classes is not None:
            right += int((logits.argmax(dim=-1) == labels).sum())
        else:
            after = labels[:, 1:]
            nats += float(F.cross_entropy(logits[:, :-1].flatten(0, 1), after.flatten(), reduction="sum"))
            tokens += int((after != IGNORED).sum())
    model.train(training)
    found = group.total(torch.tensor([right, nats, tokens], dtype=torch.float64)).tolist()
    if texts.classes is not None:
        return {"accuracy": found[0] / len(texts)}
    return {"perplexity": exp(min(found[1] / max(1.0, found[2]), 700.0))}
