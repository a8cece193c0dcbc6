"""How does a language model write many texts? In large batches, with a key-value cache, resumable batch by batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vestige.checks import check_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOKED = 16
"""Tokens between two looks at whether all texts of a batch have ended."""

Row = tuple[str, str]
"""A label, and a text."""


@dataclass(frozen=True)
class Drawing:
    """How texts are drawn: all of it public."""

    length: int
    """Of a text with its prompt, in tokens."""
    temperature: float = 1.0
    top_p: float = 0.95
    guidance: float = 0.0
    """How far a text is drawn away from what the other labels' prompts would give: 0, not at all."""
    batch: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "guidance"):
            check_number(name, getattr(self, name))
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if not self.guidance >= 0:
            raise ValueError(f"guidance={self.guidance} must be zero or more")
        if self.batch < 1:
            raise ValueError(f"sampling_batch={self.batch} must be 1 at least")


@torch.inference_mode()
def written(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    drawing: Drawing,
    end: int | None,
    pad: int | None,
    number: int,
    others: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """So many texts after a prompt, as tokens without it. `number` tells batches apart: each has chance of its own.

    With guidance g, the logits of a token are l + g (l - m), where l are those after this prompt and m the mean of
    those after this one and the others: what tells the labels apart counts more.
    """
    device = next(model.parameters()).device
    random = torch.Generator(device).manual_seed((drawing.seed * 1_000_003 + number) % 2**63)
    told = [prompt, *others] if drawing.guidance > 0 else [prompt]
    steps = [torch.tensor(each, device=device).expand(count, -1) for each in told]
    caches: list[object] = [None] * len(told)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    found: list[Tensor] = []
    bfloat16 = torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")
    for place in range(drawing.length - len(prompt)):
        with bfloat16:
            outputs = [
                model(input_ids=step, past_key_values=cache, use_cache=True)
                for step, cache in zip(steps, caches, strict=True)
            ]
        caches = [each.past_key_values for each in outputs]
        scores = torch.stack([each.logits[:, -1].float().log_softmax(dim=-1) for each in outputs])
        logits = (scores[0] + drawing.guidance * (scores[0] - scores.mean(dim=0))) / drawing.temperature
        if pad is not None and pad != end:
            logits[:, pad] = -torch.inf
        drawn = torch.multinomial(_likeliest(logits, drawing.top_p), 1, generator=random)
        drawn = drawn.squeeze(1).masked_fill(done, 0 if end is None else end)
        found.append(drawn)
        if end is not None:
            done |= drawn == end
            if place % LOOKED == LOOKED - 1 and bool(done.all()):
                break
        steps = [drawn[:, None]] * len(told)
    rows = torch.stack(found, dim=1).tolist() if found else [[] for _ in range(count)]
    return [row[: row.index(end)] if end in row else row for row in rows]


def _likeliest(logits: Tensor, top_p: float) -> Tensor:
    """Probabilities of the likeliest tokens that have `top_p` of the mass together; the others have none.

    The least probability among them is found bit by bit: sorting took most of the time of writing on a GPU.
    """
    shares = logits.softmax(dim=-1)
    if top_p == 1:
        return shares
    bits = shares.view(torch.int32)  # floats that are not negative have the order of their bits
    least = torch.zeros_like(bits[..., :1])
    for place in reversed(range(30)):
        higher = least + (1 << place)
        enough = torch.where(bits >= higher, shares, 0.0).sum(dim=-1, keepdim=True) >= top_p
        least = torch.where(enough, higher, least)
    return torch.where(bits >= least, shares, 0.0)


def batches(counts: dict[str, int], most: int) -> Iterator[tuple[int, str, int]]:
    """The batches that make so many texts of each label: a number, the label, and how many."""
    number = 0
    for label, count in counts.items():
        while count > 0:
            yield number, label, min(count, most)
            count, number = count - most, number + 1


def sampled(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[str, Sequence[int]],
    counts: dict[str, int],
    drawing: Drawing,
    file: Path,
    on_batch: Callable[[int, int, float], bool],
) -> list[Row] | None:
    """Texts of each label, a batch a line of `file`: what is there already is not drawn again. None where `on_batch`,
    which is called with texts done, texts wanted and tokens per second, says False."""
    done = _kept(file)
    total, made, begin, tokens = sum(counts.values()), sum(map(len, done)), time.perf_counter(), 0
    training = model.training
    model.eval()
    with file.open("a", encoding="utf-8") as lines:
        for number, label, count in batches(counts, drawing.batch):
            if number < len(done):
                continue
            others = [prompt for name, prompt in prompts.items() if name != label]
            end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
            found = written(model, prompts[label], count, drawing, end, pad, number, others)
            texts = tokenizer.batch_decode(found, skip_special_tokens=True)
            done.append([(label, text.strip()) for text in texts])
            lines.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
            lines.flush()
            made, tokens = made + count, tokens + sum(map(len, found))
            if not on_batch(made, total, tokens / (time.perf_counter() - begin)):
                return None
    model.train(training)
    return [row for rows in done for row in rows]


def _kept(file: Path) -> list[list[Row]]:
    """The batches that a file holds; a torn last line is cut off."""
    if not file.exists():
        return []
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        file.write_bytes(whole)
    return [[(label, words) for label, words in json.loads(line)] for line in whole.splitlines()]


def without_repeats(rows: Sequence[Row]) -> list[Row]:
    """Each text once, in order. Samples are compared with each other, and with nothing else."""
    seen: set[str] = set()
    kept = []
    for label, text in rows:
        if text not in seen:
            seen.add(text)
            kept.append((label, text))
    return kept
