"""Who decides how long a batch is? Its longest example does, where examples are padded to each other.

That must not matter to the others. What lies behind an example's end is the model's and the loss's to leave out, which
becomes an assumption of the guarantee. But where a loss is a mean over all positions, the longest example is in
everybody's divisor, and that is refused. Where it does not matter, a recording may be longer than the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from vestige.devices import without_tf32
from vestige.engines.per_example.taps import Shapes
from vestige.engines.rehearsal.rehearsing import left_as_found
from vestige.mechanism.losses.model_losses import IGNORED
from vestige.privacy_engine.calls import Call, CallForm


class Lengths:
    """The shapes of the batches that were trained on, and over how many numbers of a row their losses were means."""

    def __init__(self) -> None:
        self._averaged: dict[Shapes, set[int]] = {}

    @property
    def vary(self) -> bool:
        return len(self._averaged) > 1

    def met(self, shapes: Shapes, averaged: int | None) -> None:
        """A loss of a batch of these shapes. Raises ValueError if its divisor is the batch's length."""
        own = self._averaged.setdefault(shapes, set())
        if averaged is None:
            return
        own.add(averaged)
        others = [counts for each, counts in self._averaged.items() if each != shapes and counts]
        if others and not any(averaged in counts for counts in others):
            before = max(max(counts) for counts in others)
            raise ValueError(
                f"the loss is a mean over {averaged} numbers of each example in this batch, and over {before} in "
                "another: its divisor is decided by the longest example, which no noise covers. Pad to one length, or "
                "divide each example's own sum by a public number"
            )


# --- padded further ---------------------------------------------------------------------------------------------------

CLOSE, ROUGH = 1e-3, 3e-2
"""How far outputs may lie apart that ought to be the same, relatively; in bfloat16."""
SHORTEST = 6
"""Texts that are shorter do not tell."""
STEPS = ((64, 16), (256, 32), (1024, 64))
"""Up to this length, lengths are rounded to multiples of that."""


Long = tuple[int, int]
"""How long the texts of a call are: those that are read, and those that a decoder writes."""
DECODED = ("decoder", "labels")
"""How the arguments begin that a decoder has."""


@dataclass(frozen=True)
class Stretch:
    """Texts may be padded further: what stands behind the end of each argument that has positions, by its place."""

    values: Mapping[int, int]
    sides: Mapping[int, int]
    """Which of the two lengths is that of each."""
    outputs: tuple[int | None, ...]
    """Which is that of each output; None of one that has no positions."""


def positions(form: CallForm, call: Call) -> tuple[dict[int, int], Long] | None:
    """Which arguments are texts, rows of whole numbers, each with the side that it belongs to, and how long these are;
    None if there are none, if those of a side differ in length, or if something else is as long as they are."""
    found = [place for place in form.batched if _is_text(call.leaves[place])]
    if not found:
        return None
    names = call.names
    sides = {place: int(names.get(place, "").startswith(DECODED)) for place in found}
    lengths = [{call.leaves[place].shape[1] for place in found if sides[place] == side} for side in (0, 1)]
    others = (leaf for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and place not in sides)
    if any(len(each) > 1 for each in lengths) or any(not each.isdisjoint(o.shape) for o in others for each in lengths):
        return None
    return sides, (max(lengths[0], default=0), max(lengths[1], default=0))


def _is_text(leaf: Tensor) -> bool:
    return leaf.dim() == 2 and not leaf.is_floating_point()


def stretched(module: nn.Module, forward: Callable[..., Any], form: CallForm, call: Call) -> Stretch | None:
    """How texts of such a call are padded so that the model takes no notice; None if it does, or refuses.

    Tried on made-up examples, half as long as the call's and padded to its length: what the model makes of each
    position, or of each example, must be the same. Dropout is off meanwhile, since it differs from length to length.
    """
    texts = positions(form, call)
    if texts is None or any(0 < length < SHORTEST for length in texts[1]):
        return None
    sides, (read, written) = texts
    whole = read, written - (read == written)  # two lengths that can be told apart
    half, names = tuple(length // 2 for length in whole), call.names
    values = {place: _behind_the_end(module, names.get(place, "")) for place in sides}
    like = [call.leaves[p][:, : half[sides[p]]] if p in sides else call.leaves[p] for p in form.batched]
    modes = {each: each.training for each in module.modules()}
    try:
        with left_as_found(module), torch.no_grad(), without_tf32():
            module.eval()
            short = _shown(form.made(3, 11, like), [names.get(place, "") for place in form.batched])
            longer = [
                F.pad(part, (0, whole[sides[p]] - half[sides[p]]), value=values[p]) if p in sides else part
                for p, part in zip(form.batched, short, strict=True)
            ]
            pairs = [*zip(*(_outputs(forward, form, call, rows) for rows in (short, longer)), strict=True)]
    except Exception:  # of somebody else's model, anything
        return None
    finally:
        for each, mode in modes.items():
            each.training = mode
    outputs = tuple(_side(one.shape, other.shape, half, whole) for one, other in pairs)
    cut = [b if side is None else b[:, : half[side]] for (_, b), side in zip(pairs, outputs, strict=True)]
    alike = all(_alike(one, other) for (one, _), other in zip(pairs, cut, strict=True))
    return Stretch(values, sides, outputs) if alike else None


def _side(short: Sequence[int], longer: Sequence[int], half: Sequence[int], whole: Sequence[int]) -> int | None:
    """Whose positions an output has that became longer with them."""
    if short == longer or len(longer) < 2:
        return None
    return next((side for side in (0, 1) if (short[1], longer[1]) == (half[side], whole[side])), None)


def _behind_the_end(module: nn.Module, name: str) -> int:
    """A token that the model names for it, where tokens are; a label that is ignored; nothing where masks, kinds and
    positions are."""
    if name == "labels":
        return IGNORED
    config = getattr(module, "config", None)
    token, words = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", 0)
    usable = type(token) is int and type(words) is int and 0 <= token < words
    return token if usable and name.endswith("input_ids") else 0  # type: ignore[return-value]


def _shown(rows: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Made-up examples whose masks show the first of their positions, each more of them, as collators make them."""
    shown = []
    for part, name in zip(rows, names, strict=True):
        if "mask" in name and _is_text(part):
            ends = torch.arange(1, len(part) + 1, device=part.device) * part.shape[1] // len(part)
            part = (torch.arange(part.shape[1], device=part.device) < ends[:, None]).to(part.dtype)
        shown.append(part)
    return shown


def _outputs(forward: Callable[..., Any], form: CallForm, call: Call, rows: Sequence[Tensor]) -> list[Tensor]:
    args, kwargs = call.with_rows(rows, form.batched)
    found = tree_flatten(forward(*args, **kwargs))[0]
    return [found[place] for place in form.outputs]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    close = ROUGH if one.dtype in (torch.bfloat16, torch.float16) else CLOSE
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= close * one.norm() + 1e-9)


def rounded_up(length: int) -> int:
    step = next((step for most, step in STEPS if length <= most), 128)
    return -(-length // step) * step
