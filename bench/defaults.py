"""What does private training cost with libraries' defaults? Dropout, masks, padding, `.loss`, checkpoints.

usage: python bench/defaults.py [--device cuda|cpu] [--models NAME ...] [--ways loop train] [--steps N] [--small]
       [--tf32] [--json FILE]

Each model is trained plainly and privately on batches of the same law (Poisson samples; texts padded to the longest of
their batch): in a user's loop, and by `vestige.train`, which reads texts as they are. Set-up is everything until the
first step is done; then the mean over the next steps, over the plain loop's, and the peak of memory. A step is all that
lies between two updates: reading rows, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import vestige

ROWS, KEPT = 4096, 512


@dataclass(frozen=True)
class Model:
    build: Callable[[bool], nn.Module]
    row: Callable[[torch.Generator, bool], dict[str, Tensor]]
    batch: int
    loss: Callable[[Any, dict[str, Tensor]], Tensor] | None = None
    """Of outputs and batch; None: the model's own."""
    scored: str = "class"
    """What `vestige.train` is given to score outputs by: a class, the next token, tokens that a decoder wrote, or
    noise."""


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, model: Model, small: bool) -> None:
        self.model, self.small = model, small
        self.known: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """As many different ones as some memory holds, so that nobody waits for them to be made."""
        index %= KEPT
        if index not in self.known:
            self.known[index] = self.model.row(torch.Generator().manual_seed(index), self.small)
        return self.known[index]


class Scored(Rows):
    """The same for `vestige.train`: what a decoder has written so far is given, and there is a target."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = dict(super().__getitem__(index))
        if self.model.scored == "decoder":
            row["decoder_input_ids"] = F.pad(row["labels"][:-1], (1, 0))
        return row if "labels" in row else row | {"labels": torch.zeros(())}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts padded to the longest; everything else stacked."""
    made = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        if parts[0].dim() == 1 and not parts[0].is_floating_point():
            fill = -100 if name == "labels" else 0
            made[name] = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)
        else:
            made[name] = torch.stack(parts)
    return made


def text(
    vocabulary: int, low: int, high: int, labels: str | None
) -> Callable[[torch.Generator, bool], dict[str, Tensor]]:
    def row(g: torch.Generator, small: bool) -> dict[str, Tensor]:
        length = int(torch.randint(low if not small else 4, high if not small else 12, (), generator=g))
        ids = torch.randint(3, vocabulary if not small else 90, (length,), generator=g)
        found = {"input_ids": ids, "attention_mask": torch.ones(length, dtype=torch.long)}
        if labels == "class":
            found["labels"] = torch.randint(2, (), generator=g)
        elif labels == "same":
            found["labels"] = ids.clone()
        elif labels == "shorter":
            found["labels"] = ids[: max(2, length // 4)].clone()
        return found

    return row


def image(size: int, classes: int) -> Callable[[torch.Generator, bool], dict[str, Tensor]]:
    def row(g: torch.Generator, small: bool) -> dict[str, Tensor]:
        side = 32 if small else size
        return {
            "pixel_values": torch.randn(3, side, side, generator=g),
            "labels": torch.randint(classes, (), generator=g),
        }

    return row


def _t5(small: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 96} if small else {}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **size))


def _bert(kind: str) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        import transformers as t

        if kind == "distilbert":
            size = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 96} if small else {}
            return t.DistilBertForSequenceClassification(t.DistilBertConfig(**size))
        size = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 96,
        }
        return t.BertForSequenceClassification(t.BertConfig(**(size if small else {})))

    return build


def _gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 96} if small else {}
    return GPT2LMHeadModel(GPT2Config(pad_token_id=0, **size))


def _swin(small: bool) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    size = {"image_size": 32, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4} if small else {}
    return SwinForImageClassification(SwinConfig(num_labels=10, **size))


def _qwen(small: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16}
    size |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000}
    if small:
        size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        size |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 96}
    model = Qwen3ForCausalLM(Qwen3Config(pad_token_id=0, **size)).to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]))


def _whisper(small: bool) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size: dict[str, Any] = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6}
    size |= {"decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    if small:
        size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 96}
        size |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 50}
        size |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**size))


def _speech(g: torch.Generator, small: bool) -> dict[str, Tensor]:
    length = int(torch.randint(8, 40, (), generator=g)) if not small else int(torch.randint(4, 10, (), generator=g))
    return {
        "input_features": torch.randn(80, 100 if small else 3000, generator=g),
        "labels": torch.randint(3, 90 if small else 50000, (length,), generator=g),
    }


class UNet(nn.Module):
    """Predicts noise at time steps that it draws itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.start, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        blocks = [
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(6)
        ]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        count = pixel_values.shape[0]
        steps = torch.randint(0, 1000, (count,), device=pixel_values.device)
        noise = torch.randn_like(pixel_values)
        keep = torch.cos(steps / 1000 * math.pi / 2)[:, None, None, None]
        x = self.start(keep * pixel_values + (1 - keep**2).sqrt() * noise)
        rates = torch.exp(-torch.arange(self.width // 2, device=x.device) * (8 / self.width))
        angles = steps[:, None] * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        skips = []
        for number, block in enumerate(self.blocks):
            if number < 3:
                skips.append(x)
                x = F.avg_pool2d(x, 2)
            else:
                x = F.interpolate(x, scale_factor=2.0) + skips.pop()
            x = x + block(x + embedded[:, :, None, None])
        return self.end(x), noise


class BiLSTM(nn.Module):
    def __init__(self, small: bool) -> None:
        super().__init__()
        width = 8 if small else 256
        self.embed = nn.Embedding(96 if small else 20000, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.lstm(self.embed(input_ids))[0]
        mask = attention_mask[:, :, None]
        return self.head((hidden * mask).sum(dim=1) / mask.sum(dim=1))


def _prompted(small: bool) -> nn.Module:
    """A frozen encoder with eight residual layers that make its prompt."""
    import transformers as t

    size = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 96,
    }

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = t.BertModel(t.BertConfig(**(size if small else {}))).requires_grad_(False)
            width = self.encoder.config.hidden_size
            self.prompt = nn.Parameter(torch.randn(8, width) * 0.02)
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, width)) for _ in range(8)]
            )
            self.head = nn.Linear(width, 2)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            prompt = self.prompt
            for layer in self.layers:
                prompt = prompt + layer(prompt)
            words = self.encoder.embeddings.word_embeddings(input_ids)
            rows = torch.cat([prompt.expand(len(words), -1, -1), words], dim=1)
            mask = F.pad(attention_mask, (8, 0), value=1)
            return self.head(self.encoder(inputs_embeds=rows, attention_mask=mask).last_hidden_state[:, 0])

    return Prompted()


def classes(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])


def denoised(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(*outputs)


def _pixels(g: torch.Generator, small: bool) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 32, 32, generator=g)}


def one_length(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row, its texts padded to a power of two: for models of one's own."""
    return {
        name: F.pad(part, (0, (1 << (len(part) - 1).bit_length()) - len(part)))[None]
        if part.dim() == 1 and not part.is_floating_point()
        else part[None]
        for name, part in rows[0].items()
    }


SCORES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "class": F.cross_entropy,
    "next": lambda outputs, labels: F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:]),
    "decoder": lambda outputs, labels: F.cross_entropy(outputs.logits.transpose(1, 2), labels),
    "noise": lambda outputs, labels: F.mse_loss(*outputs),
}


MODELS = {
    "T5-small": Model(_t5, text(30000, 32, 128, "shorter"), 16, scored="decoder"),
    "DistilBERT": Model(_bert("distilbert"), text(30000, 32, 128, "class"), 32),
    "BERT-base": Model(_bert("bert"), text(30000, 32, 128, "class"), 32),
    "GPT-2": Model(_gpt2, text(50000, 64, 256, "same"), 16, scored="next"),
    "Swin-T": Model(_swin, image(224, 10), 32),
    "Qwen3 LoRA": Model(_qwen, text(32000, 64, 384, "same"), 8, scored="next"),
    "Whisper": Model(_whisper, _speech, 8, scored="decoder"),
    "U-Net": Model(lambda small: UNet(16 if small else 64), _pixels, 64, denoised, "noise"),
    "BiLSTM": Model(lambda small: BiLSTM(small), text(20000, 16, 64, "class"), 32, classes),
    "Prompts": Model(_prompted, text(30000, 32, 128, "class"), 32, classes),
}


def batches(model: Model, loader: Any, device: torch.device) -> Iterator[dict[str, Tensor]]:
    while True:
        for batch in loader:
            yield {name: part.to(device) for name, part in batch.items()}


def loss_of(model: Model, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if model.loss is None:
        return module(**batch).loss
    inputs = {name: part for name, part in batch.items() if name != "labels"}
    return model.loss(module(**inputs), batch)


class Poisson(torch.utils.data.Sampler[list[int]]):
    def __init__(self, rate: float) -> None:
        self.rate, self.generator = rate, torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(round(1 / self.rate)):
            yield (torch.rand(ROWS, generator=self.generator) < self.rate).nonzero().flatten().tolist() or [0]

    def __len__(self) -> int:
        return round(1 / self.rate)


def timed(model: Model, device: torch.device, small: bool, steps: int, way: str) -> dict[str, Any]:
    """Seconds of set-up and of steps, and the peak of memory: plainly, in a private loop, or by `vestige.train`."""
    torch.manual_seed(0)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    module = model.build(small).to(device).train()
    rows = Scored(model, small) if way == "train" else Rows(model, small)
    for index in range(KEPT):
        rows[index]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        times = iter((_training if way == "train" else _loop)(model, module, rows, device, steps, way == "loop"))
        each = [next(times) for _ in range(steps + 1)]
        said = [
            str(each.message).splitlines()[0][:160]
            for each in caught
            if "vestige" in each.filename or "captured" in str(each.message)
        ]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    later = sorted(each[1:])
    return {
        "setup": each[0], "mean": sum(later) / len(later), "median": later[len(later) // 2], "worst": later[-1],
        "memory": peak, "said": sorted(set(said)),
    }  # fmt: skip


def _loop(
    model: Model, module: nn.Module, rows: Rows, device: torch.device, steps: int, private: bool
) -> Iterator[float]:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    begun = time.perf_counter()
    loader: Any = DataLoader(rows, batch_sampler=Poisson(model.batch / ROWS), collate_fn=collate)
    if private:
        module, optimizer, loader = vestige.PrivacyEngine().make_private(
            module=module, optimizer=optimizer, noise_multiplier=1.0, max_grad_norm=1.0,
            data_loader=DataLoader(rows, batch_size=model.batch, collate_fn=collate),
        )  # fmt: skip
    for batch in batches(model, loader, device):
        optimizer.zero_grad()
        loss_of(model, module, batch).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield time.perf_counter() - begun
        begun = time.perf_counter()


def _training(
    model: Model, module: nn.Module, rows: Rows, device: torch.device, steps: int, private: bool
) -> Iterator[float]:
    own = type(module).__module__.split(".")[0] not in ("transformers", "peft")
    begun = time.perf_counter()
    training = vestige.train(
        module, SCORES[model.scored], rows, method="dp-adamw", batch_size=model.batch, steps=steps + 1, delta=1e-5,
        noise_multiplier=1.0, max_grad_norm=1.0, lr=1e-4, collate_fn=one_length if own else None, target="labels",
    )  # fmt: skip
    for _ in training:
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield time.perf_counter() - begun
        begun = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=["loop", "train"], choices=["loop", "train"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="matrix products in TF32, as docs/benchmarks.md has them")
    parser.add_argument("--json")
    given = parser.parse_args()
    unknown = set(given.models) - set(MODELS)
    if unknown or given.steps < 1:
        parser.error(f"models are {', '.join(MODELS)}; steps from 1 up")
    device, rows = torch.device(given.device), {}
    if given.tf32:
        torch.set_float32_matmul_precision("high")
    heads = ("model", "way", "plain ms", "mean over plain", "median", "worst step ms", "memory", "set-up s", "said")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in given.models:
        rows[name] = {"plain": timed(MODELS[name], device, given.small, given.steps, "plain")}
        for way in given.ways:
            try:
                rows[name][way] = timed(MODELS[name], device, given.small, given.steps, way)
            except (ValueError, RuntimeError, TypeError) as problem:
                print(f"| {name} | {way} | refused: {str(problem).splitlines()[0][:300]} |", flush=True)
                traceback.print_exc(limit=-6)
                continue
            print(line(name, way, rows[name]["plain"], rows[name][way]), flush=True)
            if given.json:
                with open(given.json, "w") as file:
                    json.dump(rows, file, indent=1)


def line(name: str, way: str, plain: dict[str, Any], ours: dict[str, Any]) -> str:
    cells = [name, way, f"{1e3 * plain['mean']:.1f}"]
    cells += [f"{ours[key] / plain[key]:.2f}x" for key in ("mean", "median")]
    memory = f"{ours['memory'] / plain['memory']:.2f}x" if plain["memory"] else ""
    cells += [f"{1e3 * ours['worst']:.0f}", memory, f"{ours['setup']:.1f}", "; ".join(ours["said"])]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
