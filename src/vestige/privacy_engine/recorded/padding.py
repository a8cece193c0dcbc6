"""May texts be padded further than they are? Where the model takes no notice, a recording may be longer than the batch.

Tried on made-up texts: what the model makes of each position, or of each example, must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from vestige.devices import without_tf32
from vestige.engines.rehearsal.rehearsing import left_as_found
from vestige.mechanism.losses.model_losses import IGNORED
from vestige.privacy_engine.calls import Call, CallForm

CLOSE, LARGE = 3e-4, 1e3
"""How far numbers may lie apart that ought to be the same, relatively; but not to what is larger than this, and stands
for something else."""
BESIDE = 0.05
"""How far parameters are moved, to see what they hide."""
ROWS, MOST_WORDS = 5, 1 << 16
SHORTEST = 6
"""Texts that are shorter do not tell."""
SPARE, ANY_LENGTH = 64, 1 << 30
"""So many positions may be taken by something else; and so many are more than anybody has."""
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
    others = [
        leaf.shape[place in form.batched :]
        for place, leaf in enumerate(call.leaves)
        if isinstance(leaf, Tensor) and place not in sides
    ]
    if any(len(each) > 1 for each in lengths) or any(not each.isdisjoint(o) for o in others for each in lengths):
        return None
    return sides, (max(lengths[0], default=0), max(lengths[1], default=0))


def _is_text(leaf: Tensor) -> bool:
    return leaf.dim() == 2 and not leaf.is_floating_point()


def stretched(module: nn.Module, forward: Callable[..., Any], form: CallForm, call: Call) -> Stretch | None:
    """How texts of such a call are padded so that the model takes no notice; None if it does, or refuses, or is none of
    transformers', whose masks mean what they say: what made-up texts do not show, nobody has promised of others.

    Tried on made-up texts, half as long as the call's and padded to its length: what the model makes of each position,
    or of each example, must be the same. So that nothing hides behind weights that are zero at first, it is tried at
    parameters beside its own.
    """
    texts = positions(form, call)
    if texts is None or not of_transformers(module) or any(0 < length < SHORTEST for length in texts[1]):
        return None
    sides, (read, written) = texts
    whole = read, written - (read == written)  # two lengths that can be told apart
    half, names = (whole[0] // 2, whole[1] // 2), call.names
    values = {place: _behind_the_end(module, names.get(place, "")) for place in sides}
    try:
        with left_as_found(module), _beside(module):
            pairs = _compared(module, forward, form, call, Stretch(values, sides, ()), half, whole)
    except RuntimeError:  # there is no room for a copy of the parameters
        return None
    if pairs is None:
        return None
    outputs = tuple(_side(one.shape, other.shape, half, whole) for one, other in pairs)
    return Stretch(values, sides, outputs) if _agree(pairs, outputs, half) else None


def takes_no_notice(
    module: nn.Module, forward: Callable[..., Any], form: CallForm, call: Call, stretch: Stretch, own: Long, to: Long
) -> bool:
    """Whether the same holds of texts that are just so long, padded so far: a model may do otherwise from some length
    on."""
    pairs = _compared(module, forward, form, call, stretch, own, to)
    return pairs is not None and _agree(pairs, stretch.outputs, own)


def of_transformers(module: nn.Module) -> bool:
    """Whether a model is one of transformers' own, or peft's around one."""
    return type(module).__module__.split(".")[0] in ("transformers", "peft")


Pairs = list[tuple[Tensor, Tensor]]


def _compared(
    module: nn.Module, forward: Callable[..., Any], form: CallForm, call: Call, stretch: Stretch, own: Long, to: Long
) -> Pairs | None:
    """The outputs of made-up texts, and of the same texts padded; None if the model refuses them. Dropout is off
    meanwhile, since it differs from length to length."""
    sides, names = stretch.sides, [call.names.get(place, "") for place in form.batched]
    like = [call.leaves[p][:, :1].expand(-1, own[sides[p]]) if p in sides else call.leaves[p] for p in form.batched]
    modes = [(each, each.training) for each in module.modules()]
    kind = like[0].device.type
    try:
        with (
            left_as_found(module, buffers_only=True),
            torch.no_grad(),
            without_tf32(),
            torch.autocast(kind, enabled=False),
        ):
            for each, _ in modes:
                each.training = False
            short = _readable(module, form.made(ROWS, 11, like), names)
            longer = [
                F.pad(part, (0, to[sides[p]] - own[sides[p]]), value=stretch.values[p]) if p in sides else part
                for p, part in zip(form.batched, short, strict=True)
            ]
            found = [_outputs(forward, form, call, rows) for rows in (short, longer)]
    except Exception:  # of somebody else's model, anything
        return None
    finally:
        for each, mode in modes:
            each.training = mode
    return [*zip(*found, strict=True)]


def _agree(pairs: Pairs, outputs: Sequence[int | None], own: Long) -> bool:
    cut = [b if side is None else b[:, : own[side]] for (_, b), side in zip(pairs, outputs, strict=True)]
    return all(_alike(one, other) for (one, _), other in zip(pairs, cut, strict=True))


@contextmanager
def _beside(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters are others, near by."""
    kept = [(p, p.detach().clone()) for p in module.parameters() if p.is_floating_point()]
    try:
        for p, _ in kept:  # by `data`: whoever has them in a graph of his own takes no notice
            random = torch.Generator(p.device).manual_seed(p.numel())
            p.data.add_(torch.randn(p.shape, generator=random, device=p.device).to(p.dtype), alpha=BESIDE)
        yield
    finally:
        for p, before in kept:
            p.data.copy_(before)


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


def _readable(module: nn.Module, rows: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Made-up texts of all words but the one that stands behind an end, and masks that show all of a text, its first
    positions, its last ones, or some."""
    config = getattr(module, "config", None)
    words, end = getattr(config, "vocab_size", None), getattr(config, "eos_token_id", None)
    random, readable = torch.Generator().manual_seed(12), []
    for part, name in zip(rows, names, strict=True):
        length = part.shape[1] if part.dim() > 1 else 0
        if "mask" in name and _is_text(part) and len(part) == ROWS:
            place = torch.arange(length)
            some = torch.rand(length, generator=random) < 0.6
            masks = [
                place >= 0,
                place <= length // 2,
                place >= length // 2,
                some | (place == 0),
                some | (place == length - 1),
            ]
            part = torch.stack(masks).to(part.device, part.dtype)
        elif _is_text(part) and (name.endswith("input_ids") or name == "labels") and type(words) is int:
            none = {_behind_the_end(module, "input_ids"), end if type(end) is int else -1}
            usable = torch.tensor([word for word in range(min(words, MOST_WORDS)) if word not in none])
            part = usable[torch.randint(len(usable), part.shape, generator=random)].to(part.device, part.dtype)
            if name == "input_ids" and type(end) is int and 0 <= end < words:
                part[:, -1] = end
        readable.append(part)
    return readable


def _outputs(forward: Callable[..., Any], form: CallForm, call: Call, rows: Sequence[Tensor]) -> list[Tensor]:
    args, kwargs = call.with_rows(rows, form.batched)
    found = tree_flatten(forward(*args, **kwargs))[0]
    return [found[place] for place in form.outputs]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Number by number of each position, beside what it is made of; bfloat16 is too coarse to tell."""
    if one.shape != other.shape or one.dtype not in (torch.float32, torch.float64) or not one.any():
        return False
    usual = 1e-2 * torch.stack([row.double().abs().clamp(max=LARGE).mean() for row in one]).mean()
    near = (_near(*rows, usual) for rows in zip(one, other, strict=True))  # one by one: there may be a large vocabulary
    return bool(torch.stack([*near]).all())


def _near(one: Tensor, other: Tensor, usual: Tensor) -> Tensor:
    one, other = one.double(), other.double()
    size = one.abs().clamp(max=LARGE)
    size = torch.maximum(size, size.mean(dim=-1, keepdim=True)) if size.dim() else size
    return ((one - other).abs() <= CLOSE * torch.maximum(size, usual)).all()


def most_positions(module: nn.Module) -> int:
    """How long texts may be at least, as far as the model tells: by its configuration and its tables of positions, of
    which some count from a padding token on. One that has neither goes by distances. 0 if it cannot be told: beyond a
    table a GPU does not refuse, but fails for good."""
    prompts = any(getattr(each, "is_prompt_learning", False) for each in getattr(module, "peft_config", {}).values())
    parts = [(name, each) for name, each in module.named_modules() if "pos" in name or name.endswith("wpe")]
    named = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if prompts or not of_transformers(module):
        return 0
    if type(named) is int:
        tables = [each for _, each in parts if isinstance(each, nn.Embedding)]
        sizes = [each.num_embeddings - (each.padding_idx or 0) for each in tables]
        return max(0, min([named, *sizes]) - SPARE)
    tensors = (*module.named_parameters(), *module.named_buffers())
    told = bool(parts) or any("pos" in name for name, _ in tensors)
    return 0 if told else ANY_LENGTH


def rounded_up(length: int) -> int:
    step = next((step for most, step in STEPS if length <= most), 128)
    return -(-length // step) * step
