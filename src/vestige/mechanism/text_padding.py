"""How far is a text padded, so that a few shapes serve all texts? To the next of some public lengths.

Models of transformers leave out what a mask leaves out, and most losses the labels that are ignored: their texts may be
padded further. How far depends on the text's own length alone (`vestige.train`), or on that of a batch that its user
has padded already (loops). Other models are given texts no longer than the longest batch so far, and only if padding
was found not to change their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vestige.mechanism.losses.model_losses import IGNORED

MASK, LABELS = "attention_mask", "labels"
DECODED = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""What a decoder writes."""
LENGTHS = ((32, 16), (64, 32), (512, 64), (1024, 128))
"""Up to this length, texts of a loop are padded to multiples of that; beyond, to multiples of 256."""
SHORTEST = 32
"""The shortest length of texts in `vestige.train`, from which the others are doubled."""
POSITIONS = 4096
"""As many a GPU takes in hardly more time than half of them."""


def rounded_length(length: int) -> int:
    step = next((step for most, step in LENGTHS if length <= most), 256)
    return -(-length // step) * step


def shortest_on_gpu(rows: float) -> int:
    """The same on a GPU, for samples of about so many rows: another length is another pass."""
    return 2 * SHORTEST if 2 * SHORTEST * rows >= POSITIONS else 4 * SHORTEST


def doubled_length(length: int, shortest: int = SHORTEST) -> int:
    """Of texts that are computed apart wherever their lengths differ: a sample is of two or three, and most of its
    texts are no longer than the longest would have made them."""
    return max(shortest, 1 << (length - 1).bit_length()) if length else 0


@dataclass(frozen=True)
class TextPadding:
    """How the texts of one model are padded."""

    token: int
    """What lies behind the end of a text."""
    longest: int
    """How long texts may be: beyond a table of positions a GPU does not refuse, but fails for good."""
    decodes: bool = False
    """Whether a decoder writes texts of another length than the encoder reads."""

    @classmethod
    def of(cls, module: nn.Module) -> TextPadding:
        config = getattr(module, "config", None)
        token = getattr(config, "pad_token_id", None)
        decodes = bool(getattr(config, "is_encoder_decoder", False))
        return cls(token if type(token) is int else 0, _most_positions(module), decodes)

    def lengths(
        self, named: Mapping[str, Tensor], axis: int = 1, rounded: Callable[[int], int] = rounded_length
    ) -> dict[str, int]:
        """To which length each text among these arguments is padded, whose positions are on `axis`; none, if one of
        them has no mask of its length."""
        texts = {name: each for name, each in named.items() if each.dim() == axis + 1 and not each.is_floating_point()}
        read = texts[MASK].shape[axis] if MASK in texts else 0
        for name, each in texts.items():
            if not (self.decodes and name in DECODED) and each.shape[axis] != read:
                return {}
        return {
            name: max(each.shape[axis], min(rounded(each.shape[axis]), self.longest)) for name, each in texts.items()
        }

    def further(self, named: Mapping[str, Tensor]) -> dict[str, int]:
        """Longer ones than these texts have, to try out; none, if there are none."""
        to = {name: min(rounded_length(named[name].shape[1] + 1), self.longest) for name in self.lengths(named)}
        return to if all(length > named[name].shape[1] for name, length in to.items()) else {}

    def pad(self, named: Mapping[str, Tensor], to: Mapping[str, int]) -> dict[str, Tensor]:
        """These arguments, with texts of so many positions."""
        return {
            name: F.pad(each, (0, to[name] - each.shape[-1]), value=self._filler(name)) if name in to else each
            for name, each in named.items()
        }

    def stacked(self, name: str, texts: Sequence[Tensor], length: int) -> Tensor:
        """Texts of one argument, none longer than this length, as rows of it."""
        filler = self._filler(name)
        rows = pad_sequence(list(texts), batch_first=True, padding_value=filler)
        return F.pad(rows, (0, length - rows.shape[1]), value=filler)

    def _filler(self, name: str) -> int:
        if name == LABELS:
            return IGNORED
        return self.token if name.endswith("input_ids") else 0


@dataclass(frozen=True)
class PaddedAlone:
    """Pads the texts of one example by their own length, which is doubled from the shortest on."""

    padding: TextPadding
    names: tuple[str, ...]
    """Of an example's fields, in their order; the last one is the target."""
    shortest: int = SHORTEST

    def lengths(self, values: Sequence[object]) -> list[int | None]:
        """Of how many positions each of an example's fields will be; None where it is no text, or long enough."""
        tensors = {n: v for n, v in zip(self.names, values, strict=True) if isinstance(v, Tensor)}
        rounded = partial(doubled_length, shortest=self.shortest)
        if all(each.dim() != 1 or rounded(len(each)) == len(each) for each in tensors.values()):
            return [None] * len(values)
        found = self.padding.lengths(tensors, axis=0, rounded=rounded)
        return [found.get(name) for name in self.names]

    def stacked(self, place: int, texts: Sequence[Tensor], length: int) -> Tensor:
        """Examples' texts in this place, one beside the other, each of so many positions."""
        return self.padding.stacked(self.names[place], texts, length)


def ignored_for_certain(module: nn.Module) -> bool:
    """Whether padding changes nothing, as far as is known: of models of transformers, and of peft's around them."""
    return type(module).__module__.split(".")[0] in ("transformers", "peft")


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are the same but for rounding; zeros (an untrained head) do not count."""
    rounding, largest = 1e-4 if a.dtype in (torch.float32, torch.float64) else 2e-2, a.abs().max()
    return bool(largest > 0) and bool((a - b).abs().max() <= rounding * largest)


def _most_positions(module: nn.Module) -> int:
    """How long texts may be, as far as the model or a part of it tells."""
    prompts = any(getattr(each, "is_prompt_learning", False) for each in getattr(module, "peft_config", {}).values())
    known = list[int]()
    for name, each in module.named_modules():
        config = getattr(each, "config", None)
        found = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions")]
        known += [number for number in found if type(number) is int]
        if isinstance(each, nn.Embedding) and ("position" in name or name.endswith("wpe")):
            known.append(each.num_embeddings - 2)
    return 0 if prompts else min(known, default=1 << 30)
