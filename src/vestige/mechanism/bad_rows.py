"""What becomes of a row that cannot be read, collated or computed? It contributes nothing, and no message names it.

An error that one row causes would stop the training at the step that draws it: when it stopped would show that the row
is there. So what is at fault with the program is found on made-up rows, before any is read, and what is at fault with a
row later on costs that row its contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vestige.checks import ExampleKept
from vestige.layout import call_with
from vestige.mechanism.clipping import Batch, Loss
from vestige.mechanism.losses.criteria import Form, example_losses
from vestige.mechanism.text_padding import LABELS, MASK, TextPadding, alike
from vestige.tf32 import without_tf32

Admissible = Callable[[Tensor], Tensor]
"""Which of these targets, on the CPU, the loss can be taken of."""
PROBED = 64
"""Labels within so wide a range are tried one by one; of more, those below zero, the smallest and the largest."""


def made_up_pass(model: nn.Module, loss: Loss, form: Form, row: Batch) -> Admissible | None:
    """Try the model and the loss on one made-up row, without gradients; None where that fails.

    What comes back says which labels the loss takes: each is tried on the CPU with outputs of zeros, since an index out
    of range ends every later computation on a GPU.
    """
    given = form.split(row)[2]
    targets, *further = given if isinstance(given, tuple) else (given,)
    try:
        with torch.no_grad():
            zeros = tree_map(lambda part: torch.zeros_like(part, device="cpu"), made_up_outputs(model, form, row))
            beside = tuple(part.cpu() for part in further)
            example_losses(loss, zeros, (targets.cpu(), *beside) if beside else targets.cpu())
    except Exception:  # whatever a user's model raises on made-up rows
        return None
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
        least, most = (int(value) for value in each.aminmax())
        inside = (each > max(least, 0)) & (each < most)
        if all([taken(value) for value in (each if most - least < PROBED else each[~inside]).unique().tolist()]):
            return torch.ones(len(labels), dtype=torch.bool)
        wrong = [value for value in each.unique().tolist() if not taken(value)]
        return ~torch.isin(each, torch.tensor(wrong)).any(dim=1)

    return admissible


def made_up_outputs(model: nn.Module, form: Form, row: Batch) -> object:
    """What the model makes of a made-up row, without gradients or random draws; it is left as it was."""
    modes = {module: module.training for module in model.modules()}
    args, named, _ = form.split(row)
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng([row[0].device] if row[0].is_cuda else []):
            point = {name: p.detach() for name, p in model.named_parameters()}
            point |= {name: buffer.clone() for name, buffer in model.named_buffers()}
            return call_with(model, point, args, named)
    finally:
        for module, mode in modes.items():
            module.training = mode


def ignores_padding(model: nn.Module, loss: Loss, form: Form, row: Batch, padding: TextPadding) -> bool:
    """Whether the loss of a made-up row stays the same when its texts are padded further."""
    names = (*(form.names or ()), *form.further, LABELS)
    named = {name: torch.ones_like(part) if name == MASK else part for name, part in zip(names, row, strict=True)}
    further = padding.further(named)
    if not further:
        return False
    losses = []
    try:
        with torch.no_grad(), without_tf32():
            for each in (named, padding.pad(named, further)):
                made = list(each.values())
                losses.append(example_losses(loss, made_up_outputs(model, form, made), form.split(made)[2]))
    except Exception:  # a user's model may raise anything on made-up rows
        return False
    return alike(*losses)


def readable(read: Callable[[int], list[object]], rows: Sequence[int]) -> list[list[object]]:
    """SENSITIVE: those of these rows that can be read and collated."""
    found = []
    for row in rows:
        try:
            found.append(read(row))
        except Exception:  # whatever a user's dataset or collate_fn raises: one row must not decide
            continue
    return found


def lost_for_good(error: Exception) -> bool:
    """Whether nothing can be computed any more (an index out of range on a GPU ends its context), or the model is no
    longer fit to be published."""
    return isinstance(error, ExampleKept) or "device-side assert" in str(error) or "CUDA error" in str(error)
