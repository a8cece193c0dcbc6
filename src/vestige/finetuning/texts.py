"""What is an example of a text? Its tokens, cut and padded to a public length, with what it is to be told apart by.

All examples have one shape, whatever was written: neither a batch nor a step's time depends on a text's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vestige.mechanism.losses.model_losses import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1000
"""Texts that are given to the tokenizer together."""


@dataclass(frozen=True)
class Texts(Dataset[object]):
    """SENSITIVE: tokenised texts. Without classes, each is to be continued: its labels are its own tokens."""

    tokens: Tensor
    """[rows, length], int32."""
    lengths: Tensor
    classes: Tensor | None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = self.tokens[row].long()
        written = torch.arange(len(tokens)) < self.lengths[row]
        labels = tokens.masked_fill(~written, IGNORED) if self.classes is None else self.classes[row]
        return {"input_ids": tokens, "attention_mask": written.long(), "labels": labels}


def tokenised(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[object], length: int, classes: Sequence[int] | None = None
) -> Texts:
    """The texts as tokens. One without any keeps its first place open: attention to nothing is undefined."""
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"data: row {number} holds no text where it should: its text is of another type")
    tokens = torch.full((len(texts), length), tokenizer.pad_token_id, dtype=torch.int32)
    lengths = torch.ones(len(texts), dtype=torch.int32)
    for first in range(0, len(texts), AT_ONCE):
        some = tokenizer(list(texts[first : first + AT_ONCE]), truncation=True, max_length=length, padding=False)
        for row, written in enumerate(some["input_ids"], first):
            tokens[row, : len(written)] = torch.tensor(written, dtype=torch.int32)
            lengths[row] = max(1, len(written))
    return Texts(tokens, lengths, None if classes is None else torch.tensor(classes))


def numbers_of(labels: Sequence[object], names: Mapping[str, int]) -> list[int]:
    """The class of each label, by the names that were declared."""
    classes = [names.get(_name(label)) for label in labels]
    if None in classes:
        raise ValueError(
            f"data: the label of row {classes.index(None) + 1} is none of the {len(set(names.values()))} that are "
            "declared; declare all that may occur: labels=neg,pos, say"
        )
    return classes  # type: ignore[return-value]


def class_names(declared: Sequence[str]) -> dict[str, int]:
    """The number of each declared name; their places count too, unless names are numbers themselves."""
    names = {name: number for number, name in enumerate(declared)}
    if any(name.removeprefix("-").isdigit() for name in declared):
        return names
    return {**{str(number): number for number in names.values()}, **names}


def _name(label: object) -> str:
    return str(label).lower() if isinstance(label, bool) else str(label).strip()
