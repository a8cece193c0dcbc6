"""What does private fine-tuning give, and cost? A small language model, pre-trained here on one half of IMDb's reviews.

usage: python bench/finetuning.py [--data FOLDER] [--device cpu|cuda] [--tasks classification causal-lm]
       [--epsilons 8 3 1] [--lora R] [--epochs N] [--minutes M] [--smoke] [--json FILE]

One half of the reviews is taken as public: a byte-level tokenizer and a model of GPT-2's shape are trained on it, but
for a part that is kept to test on. The other half is private: the model is fine-tuned on it by what `vestige finetune`
does, at each epsilon, and without privacy by an ordinary loop with as many steps, the same learning rate and parts of
the same size. A review that occurs twice is used once, so that no private one is public too. Learning rates are fixed
beforehand. Each epsilon is that of one run, released alone. --minutes leaves out what would begin later. FOLDER has
imdb.jsonl.gz.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.finetuning.job import FineTuning, complete, prepared, start
from vestige.finetuning.pretrained_models import Checkpoint, quiet
from vestige.finetuning.quality import judged
from vestige.finetuning.texts import Texts, tokenised
from vestige.mechanism.losses.model_losses import IGNORED, next_token

LABELS = ("neg", "pos")
TASKS = ("classification", "causal-lm")


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    reviews: int
    tested: int
    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int
    public_steps: int
    public_batch: int
    batch: int
    part: int
    delta: float


WHOLE = Sizes(50_000, 2_000, 8_192, 384, 6, 6, 192, 1_500, 128, 1_024, 256, 1e-5)
SMOKE = Sizes(240, 40, 400, 32, 2, 2, 24, 6, 16, 40, 20, 1e-3)


@dataclass(frozen=True)
class Halves:
    """Reviews as (text, label): what the model knows before, what it is tested on, and what is to be protected."""

    public: list[tuple[str, int]]
    tested: list[tuple[str, int]]
    private: list[tuple[str, int]]


def halves(file: Path, sizes: Sizes) -> Halves:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        found = {review["text"].replace("<br />", " "): review["label"] for review in map(json.loads, lines)}
    reviews = list(found.items())
    random.Random(0).shuffle(reviews)
    reviews = reviews[: sizes.reviews]
    half = len(reviews) // 2
    return Halves(reviews[sizes.tested : half], reviews[: sizes.tested], reviews[half:])


# --- the public half --------------------------------------------------------------------------------------------------


def tokenizer_of(texts: list[str], sizes: Sizes) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<end>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    length = sizes.length
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", model_max_length=length)


def pretrained(known: Halves, sizes: Sizes, folder: Path, device: str) -> Checkpoint:
    """A checkpoint of a model that has read the public half."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tokenizer_of([text for text, _ in known.public], sizes)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=sizes.length, n_embd=sizes.width, n_layer=sizes.layers,
        n_head=sizes.heads, bos_token_id=0, eos_token_id=0, pad_token_id=1, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    texts = tokenised(tokenizer, [text for text, _ in known.public], sizes.length)
    trained(model.train(), texts, token_loss, sizes.public_steps, sizes.public_batch, sizes.public_batch, 1e-3, True)
    with quiet():
        model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return Checkpoint(model, tokenizer, "model", use_cache=False)


def token_loss(outputs: Any, labels: Tensor) -> Tensor:
    return next_token(outputs, {"labels": labels}, None)


def class_loss(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, labels, reduction="none")


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {"classification": class_loss, "causal-lm": token_loss}


def fetched(texts: Texts, rows: Tensor, device: Any) -> dict[str, Tensor]:
    """These rows, as a model is called with them."""
    tokens, lengths = texts.tokens[rows].long(), texts.lengths[rows]
    written = torch.arange(tokens.shape[1]) < lengths[:, None]
    labels = tokens.masked_fill(~written, IGNORED) if texts.classes is None else texts.classes[rows]
    batch = {"input_ids": tokens, "attention_mask": written.long(), "labels": labels}
    return {name: part.to(device, non_blocking=True) for name, part in batch.items()}


def trained(
    model: nn.Module,
    texts: Texts,
    loss: Callable[[Any, Tensor], Tensor],
    steps: int,
    batch: int,
    part: int,
    lr: float,
    scratch: bool = False,
) -> float:
    """Ordinary training, without privacy; the padded tokens of a second, but for the first step.

    From `scratch` the rate rises over the first tenth and falls to nothing, gradients are clipped, and on a GPU the
    model computes in bfloat16, as usual.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    shares = (lambda step: min(10 * (step + 1) / steps, 1 - step / steps)) if scratch else (lambda step: 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shares)
    order, begin = torch.Generator().manual_seed(0), time.perf_counter()
    for step in range(steps):
        rows = torch.randperm(len(texts), generator=order)[:batch]
        optimizer.zero_grad()
        for some in rows.split(part):
            given = fetched(texts, some, device)
            labels = given.pop("labels")
            # Anew for each pass: autocast keeps its bfloat16 copies of the weights until it ends.
            with torch.autocast(device.type, torch.bfloat16, enabled=scratch and device.type == "cuda"):
                found = loss(model(**given), labels)
            (found.sum() / batch).backward()
        if scratch:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step == 0:
            begin = settled(device)
    return batch * texts.tokens.shape[1] * (steps - 1) / (settled(device) - begin)


def settled(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# --- the private half -------------------------------------------------------------------------------------------------


def quality(model: nn.Module, texts: Texts) -> float:
    """On the public test part: accuracy, or perplexity."""
    (found,) = judged(model, texts).values()
    return found


class Fine:
    """Fine-tunings of one task from one checkpoint."""

    def __init__(self, task: str, known: Halves, folder: Path, sizes: Sizes, options: argparse.Namespace) -> None:
        self.task, self.sizes, self.options, self.folder = task, sizes, options, folder
        file = folder / "private.jsonl"
        rows = ({"text": text, "label": LABELS[label]} for text, label in known.private)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        labelled = {"label_column": "label", "labels": LABELS} if task == "classification" else {}
        self.job = FineTuning(
            model=str(folder / "checkpoint"), data=str(file), task=task, max_length=sizes.length, lora=options.lora,
            delta=sizes.delta, batch=sizes.batch, epochs=options.epochs, lr=options.lr, physical_batch=sizes.part,
            device=options.device, epsilon=1.0, **labelled,
        )  # fmt: skip
        self.checkpoint = prepared(self.job)[0]
        classes = [label for _, label in known.tested] if task == "classification" else None
        self.tested = tokenised(self.checkpoint.tokenizer, [text for text, _ in known.tested], sizes.length, classes)

    def before(self) -> dict[str, Any]:
        """Of the checkpoint as it is; a head that has learned nothing tells nothing."""
        return {"row": "before", "quality": quality(self.checkpoint.model, self.tested)}

    def plain(self) -> dict[str, Any]:
        (checkpoint, texts, _), sizes = prepared(self.job), self.sizes
        steps = self.options.epochs * max(1, round(len(texts) / sizes.batch))
        model, lr = checkpoint.model, self.options.lr
        tokens = trained(model, texts, LOSSES[self.task], steps, sizes.batch, sizes.part, lr)
        return {"row": "without privacy", **self.seen(model, tokens)}

    def private(self, epsilon: float) -> dict[str, Any]:
        job = replace(self.job, epsilon=epsilon)
        checkpoint, public, training = start(job, self.folder / f"{self.task}-{epsilon:g}")
        marks: list[float] = []

        def on_record(record: Any) -> bool:
            if record.step in (0, training.plan.steps - 1):
                marks.append(settled(torch.device(self.options.device)))
            return True

        result = complete(job, checkpoint, public, training, on_record)
        seconds = marks[-1] - marks[0]
        tokens = training.expected_batch * job.max_length * (result.steps - 1) / seconds if seconds else math.nan
        stated = {"epsilon": result.statement.epsilon, "noise_multiplier": result.statement.noise_multiplier}
        return {"row": f"epsilon {epsilon:g}", **stated, **self.seen(checkpoint.model, tokens)}

    def seen(self, model: nn.Module, tokens: float) -> dict[str, Any]:
        cuda = self.options.device == "cuda"
        memory = torch.cuda.max_memory_allocated() / 2**20 if cuda else None  # before the test, which takes some too
        return {"tokens_per_second": tokens, "MiB": memory, "quality": quality(model, self.tested)}

    def rows(self) -> Iterator[Callable[[], dict[str, Any]]]:
        yield self.before
        yield self.plain
        for epsilon in self.options.epsilons:
            yield lambda epsilon=epsilon: self.private(epsilon)


# --- the table --------------------------------------------------------------------------------------------------------


def line(result: dict[str, Any]) -> str:
    task, good = result["task"], result["quality"]
    shown = f"accuracy {good:.1%}" if task == "classification" else f"perplexity {good:.2f}"
    cells = [task, result["row"], shown]
    cells.append(f"{result['tokens_per_second']:,.0f}" if "tokens_per_second" in result else "")
    cells.append(f"{result['time']:.2f}x" if "time" in result else "")
    cells.append(f"{result['MiB']:,.0f}" if result.get("MiB") else "")
    cells.append(f"{result['memory']:.2f}x" if "memory" in result else "")
    return f"| {' | '.join(cells)} |"


def against(result: dict[str, Any], plain: dict[str, Any]) -> None:
    """How many times the time and the memory of plain training."""
    result["time"] = plain["tokens_per_second"] / result["tokens_per_second"]
    if result["MiB"]:
        result["memory"] = result["MiB"] / plain["MiB"]


def table(known: Halves, folder: Path, sizes: Sizes, options: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for task in options.tasks:
        fine, plain = Fine(task, known, folder, sizes, options), None
        for make in fine.rows():
            if time.perf_counter() > until:
                print(f"(left out of {task}: the {options.minutes:g} minutes are over)")
                break
            if options.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            result = {"task": task, **make()}
            if result["row"] == "without privacy":
                plain = result
            elif plain is not None:
                against(result, plain)
            results.append(result)
            print(line(result), flush=True)
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[8.0, 3.0, 1.0])
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters; 0: the whole model")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--smoke", action="store_true", help="seconds on a CPU: shows that it runs, nothing else")
    parser.add_argument("--precision", choices=["tf32", "torch"], default="tf32")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    options.lora = options.lora or None
    return options


def main() -> None:
    options = arguments()
    sizes, until = SMOKE if options.smoke else WHOLE, time.perf_counter() + 60 * options.minutes
    file = options.data / "imdb.jsonl.gz"
    if not file.exists():
        print(f"skipped: there is no {file}; give the folder that has it by --data")
        return
    if options.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    known = halves(file, sizes)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {machine}, precision {options.precision} on a GPU")
    with tempfile.TemporaryDirectory() as scratch:
        folder, begin = Path(scratch), time.perf_counter()
        model = pretrained(known, sizes, folder / "checkpoint", options.device).model
        size = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{size:,} parameters, pre-trained on {len(known.public):,} public reviews in "
            f"{time.perf_counter() - begin:.0f} s; {len(known.private):,} private ones, {options.epochs} epochs of "
            f"{sizes.batch}, LoRA {options.lora}, {sizes.length} tokens each; tested on {len(known.tested):,}\n"
        )
        del model
        print("| task | row | on the test part | padded tokens/s | time | peak MiB | memory |")
        print("|---|---|---|---|---|---|---|")
        results = table(known, folder, sizes, options, until)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "rows": results}))


if __name__ == "__main__":
    main()
