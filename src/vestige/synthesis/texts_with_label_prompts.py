"""What is an example of a labelled text? Its label as a prompt, and the text after it, which alone is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vestige import tasks
from vestige.files import read_json, write_json
from vestige.finetuning.texts import Texts, class_names, numbers_of
from vestige.mechanism.losses.model_losses import IGNORED
from vestige.priced_questions import Gaussian, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1000


@dataclass(frozen=True)
class PromptedTexts(Texts):
    """SENSITIVE: tokenised texts behind their prompts, which have no loss."""

    prompts: Tensor
    """How many tokens of each row are its prompt."""

    def __getitem__(self, row: int) -> dict[str, object]:
        found = super().__getitem__(row)
        prompt = torch.arange(self.tokens.shape[1]) < self.prompts[row]
        return {**found, "labels": found["labels"].masked_fill(prompt, IGNORED)}


@dataclass(frozen=True)
class Prompts:
    """The prompt of each label: public tokens. Without labels there is one prompt, the token that begins a text."""

    tokens: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    """The labels; none: texts have no label."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, names: Sequence[str] | None) -> Prompts:
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        first = () if begin is None else (int(begin),)
        if not names:
            if not first:
                raise ValueError("model: its tokenizer has no token that begins or ends a text; give labels, too")
            return cls((first,), ())
        made = [first + tuple(tokenizer(f"{name}:", add_special_tokens=False)["input_ids"]) for name in names]
        for number, prompt in enumerate(made):
            if len(prompt) == len(first) or prompt in made[:number]:
                raise ValueError(
                    f"labels={names[number]!r} has no prompt of its own in the model's vocabulary; rename it"
                )
        return cls(tuple(made), tuple(names))

    @property
    def longest(self) -> int:
        return max(map(len, self.tokens))

    def which(self, tokens: Tensor) -> Tensor:
        """Which label's prompt each row of tokens begins with, as zeros and ones: [rows, labels]. Of two that fit, the
        longer one counts."""
        fits = torch.zeros(len(tokens), len(self.tokens), dtype=torch.bool, device=tokens.device)
        for number in np.argsort([-len(prompt) for prompt in self.tokens], kind="stable"):
            prompt = torch.tensor(self.tokens[number], device=tokens.device)
            fits[:, number] = (tokens[:, : len(prompt)] == prompt).all(dim=1) & ~fits.any(dim=1)
        return fits.double()

    def read(
        self, file: str, text_column: str, label_column: str | None, tokenizer: PreTrainedTokenizerBase, length: int
    ) -> PromptedTexts:
        """The texts of a file, each behind its label's prompt and with an end, cut and padded to a public length."""
        texts, labels = read_texts(file, text_column, label_column, self.names)
        end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        tokens = torch.full((len(texts), length), tokenizer.pad_token_id, dtype=torch.int32)
        lengths, prompts = torch.ones(len(texts), dtype=torch.int32), torch.ones(len(texts), dtype=torch.int32)
        for first in range(0, len(texts), AT_ONCE):
            some = tokenizer(list(texts[first : first + AT_ONCE]), add_special_tokens=False, truncation=True,
                             max_length=length, padding=False)["input_ids"]  # fmt: skip
            for row, written in enumerate(some, first):
                prompt = self.tokens[labels[row]]
                whole = (prompt + tuple(written) + end)[:length]
                tokens[row, : len(whole)] = torch.tensor(whole, dtype=torch.int32)
                lengths[row], prompts[row] = len(whole), len(prompt)
        return PromptedTexts(tokens, lengths, None, prompts)


def read_texts(
    file: str, text_column: str, label_column: str | None, names: Sequence[str]
) -> tuple[list[str], list[int]]:
    """SENSITIVE: the texts of a file and the numbers of their labels."""
    columns = {"text_column": text_column} | ({} if label_column is None else {"label_column": label_column})
    found = tasks.read_columns(Path(file), columns)
    texts = found["text_column"]
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"data: row {number} holds no text where it should: its text is of another type")
    labels = [0] * len(texts) if label_column is None else numbers_of(found["label_column"], class_names(names))
    return texts, labels


class LabelCounts:
    """How many texts have each label, noised: one question before the first step of training.

    Formal guarantees: one Gaussian mechanism: a text has one label.
    """

    bounds: tuple[float, ...] = (1.0,)

    def __init__(self, prompts: Prompts, multiplier: float, file: Path) -> None:
        self._prompts, self._file = prompts, file
        self.multiplier = multiplier

    def __repr__(self) -> str:
        return f"LabelCounts(labels={len(self._prompts.names)}, multiplier={self.multiplier!r})"

    @property
    def questions(self) -> tuple[Question, ...]:
        return (Gaussian(self.multiplier),)

    def of(self, batch: Sequence[Tensor]) -> Tensor:
        return self._prompts.which(batch[0]).sum(dim=0, keepdim=True)

    def receive(self, model: nn.Module, totals: Tensor, count: float) -> None:
        write_json(self._file, dict(zip(self._prompts.names, totals[0].tolist(), strict=True)))

    def shares(self) -> dict[str, float]:
        """The released shares; a count that noise made negative is none."""
        return shares_of({name: max(0.0, count) for name, count in read_json(self._file).items()})


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    if not total > 0:
        return {name: 1 / len(weights) for name in weights}
    return {name: weight / total for name, weight in weights.items()}


def counts_of(shares: Mapping[str, float], samples: int) -> dict[str, int]:
    """So many samples, divided by shares: whole numbers, the largest remainders rounded up."""
    exact = {name: share * samples for name, share in shares.items()}
    found = {name: int(value) for name, value in exact.items()}
    rest = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in rest[: samples - sum(found.values())]:
        found[name] += 1
    return found
