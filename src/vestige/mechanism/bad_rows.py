"""What becomes of a row that cannot be read, collated or computed? It contributes nothing, and no message names it.

An error that one row causes would stop the training at the step that draws it: when it stopped would show that the row
is there. So what is at fault with the program is found on made-up rows, before any is read, and what is at fault with a
row later on costs that row its contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from vestige.mechanism.clipping import Batch, Loss
from vestige.mechanism.losses.criteria import Form, example_losses

Admissible = Callable[[Tensor], Tensor]
"""Which of these targets, on the CPU, the loss can be taken of."""
PROBED = 1024
"""Different labels that are tried one by one."""


def made_up_pass(model: nn.Module, loss: Loss, form: Form, row: Batch) -> Admissible | None:
    """Try the model and the loss on one made-up row, without gradients; None where that fails.

    What comes back says which labels the loss takes: each is tried on the CPU with outputs of zeros, since an index out
    of range ends every later computation on a GPU.
    """
    modes = {module: module.training for module in model.modules()}
    args, named, given = form.split(row)
    targets, *further = given if isinstance(given, tuple) else (given,)
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng([targets.device] if targets.is_cuda else []):
            point = {name: p.detach() for name, p in model.named_parameters()}
            point |= {name: buffer.clone() for name, buffer in model.named_buffers()}
            outputs = functional_call(model, point, args, named)
            zeros = tree_map(lambda part: torch.zeros_like(part, device="cpu"), outputs)
            beside = tuple(part.cpu() for part in further)
            example_losses(loss, zeros, (targets.cpu(), *beside) if beside else targets.cpu())
    except Exception:  # whatever a user's model raises on made-up rows
        return None
    finally:
        for module, mode in modes.items():
            module.training = mode
    known: dict[int, bool] = {}

    def taken(label: int) -> bool:
        if label not in known:
            try:
                with torch.no_grad():
                    tried = torch.full_like(targets.cpu(), label)
                    example_losses(loss, zeros, (tried, *beside) if beside else tried)
                known[label] = True
            except Exception:  # out of range, in the words of any loss
                known[label] = False
        return known[label]

    def admissible(labels: Tensor) -> Tensor:
        each = labels.reshape(len(labels), -1)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or not each.numel():
            return torch.ones(len(labels), dtype=torch.bool)
        values = each.unique()
        tried = values if len(values) <= PROBED else torch.stack([values.min(), values.max()])
        wrong = [int(value) for value in tried if not taken(int(value))]
        if not wrong:
            return torch.ones(len(labels), dtype=torch.bool)
        if len(values) > PROBED:
            wrong = [int(value) for value in values if not taken(int(value))]
        return ~torch.isin(each, torch.tensor(wrong)).any(dim=1)

    return admissible


def readable(read: Callable[[int], list[Any]], rows: Sequence[int]) -> list[list[Any]]:
    """SENSITIVE: those of these rows that can be read and collated."""
    found = []
    for row in rows:
        try:
            found.append(read(row))
        except Exception:  # whatever a user's dataset or collate_fn raises: one row must not decide
            continue
    return found


def lost_for_good(error: Exception) -> bool:
    """Whether nothing can be computed any more: an index out of range on a GPU ends its context."""
    return "device-side assert" in str(error) or "CUDA error" in str(error)
