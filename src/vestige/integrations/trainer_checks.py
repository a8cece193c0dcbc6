"""Which settings of a Trainer would break the guarantee? They are refused, each in one line with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lengths")
"""What collators add that put examples into one row."""
OWN_STEPS = ("layerwise", "lomo")
"""Optimizers that move in the backward pass."""
SAMPLERS = ("get_train_dataloader", "_get_dataloader", "_get_train_sampler")
PACKED = (
    "several examples in one row: clipping bounds a row, so one person's row would hold others' examples and a pass "
    "could not be told from a smaller one. Pad instead"
)


def refuse_settings(trainer: Any) -> None:
    """Raise ValueError at the first setting of a Trainer that a private run cannot have."""
    args = trainer.args
    strategy = getattr(args, "train_sampling_strategy", "random")
    optim = str(getattr(args.optim, "value", args.optim))
    refused = {
        "fp16=True": (args.fp16, "float16 loses the small gradients of single examples: use bf16=True"),
        "torch_compile=True": (
            args.torch_compile,
            "private passes look inside the model, and a compiled one shows nothing: leave it out",
        ),
        "auto_find_batch_size=True": (
            args.auto_find_batch_size,
            "the sampling rate would follow from what fits, and be priced as another: give a batch size, and split it "
            "by gradient_accumulation_steps",
        ),
        f"label_smoothing_factor={args.label_smoothing_factor}": (
            args.label_smoothing_factor,
            "the Trainer's smoothed loss is divided by everyone's targets: leave it out",
        ),
        f"neftune_noise_alpha={args.neftune_noise_alpha}": (
            args.neftune_noise_alpha,
            "its noise is scaled by the padded length, which the longest example of a batch decides: leave it out",
        ),
        "include_num_input_tokens_seen": (
            getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False),
            "the number of tokens of a sample is not public, and would be logged",
        ),
        f"train_sampling_strategy={strategy!r}": (
            strategy != "random" or getattr(args, "group_by_length", False),
            "the price is that of Poisson samples, in which every example is as likely; they take the place of random "
            "shuffling only",
        ),
        f"optim={optim!r}": (
            any(name in optim for name in OWN_STEPS),
            "it moves in the backward pass, before there is noise: choose adamw_torch or sgd, say",
        ),
        "debug": (args.debug, "it prints values of single batches"),
        "several devices in one process, DeepSpeed or FSDP": (
            args.n_gpu > 1 or args.deepspeed or args.fsdp,
            "every process has one device and a whole model here: start several by torchrun, or set "
            "CUDA_VISIBLE_DEVICES to one device",
        ),
        "use_reentrant=True": (
            args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"),
            "a reentrant checkpoint hides its layers from the pass: use_reentrant=False",
        ),
        "packing=True": (getattr(args, "packing", False), PACKED),
        "padding_free=True": (getattr(args, "padding_free", False), PACKED),
        f"loss_type={getattr(args, 'loss_type', None)!r}": (
            getattr(args, "loss_type", None) not in (None, "nll"),
            "private training takes the loss that the model computes itself, which is 'nll'",
        ),
    }
    for setting, (found, why) in refused.items():
        if found:
            raise ValueError(f"{setting} is refused in private training: {why}")
    _refuse_collator(trainer.data_collator)
    _refuse_router(trainer.model)


def _refuse_collator(collator: object) -> None:
    name = type(collator).__name__
    if "Flattening" in name or getattr(collator, "padding_free", False):
        raise ValueError(f"data_collator={name} puts {PACKED}")


def _refuse_router(model: object) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "the model's loss holds its router's balance, which is of the whole batch: an example would change "
            "everyone's gradient. Set model.config.output_router_logits = False"
        )


def refuse_own_sampling(classes: Iterable[type]) -> None:
    """Of the classes between ours and the Trainer: one that draws batches in its own way would be passed over."""
    for each in classes:
        for name in SAMPLERS:
            if name in vars(each):
                raise ValueError(
                    f"{each.__name__} has its own {name}: its way of drawing would be replaced by Poisson samples, in "
                    "which every example is as likely. Leave it out"
                )


def refuse_flattened(batch: object, rows: int) -> None:
    """A batch has a row for each of the examples that were drawn."""
    if not isinstance(batch, Mapping):
        return
    found = [name for name in FLATTENED if name in batch]
    if found:
        raise ValueError(f"the batch has {found[0]}: its collator puts {PACKED}")
    lengths = [len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if lengths and rows > 1 and set(lengths) == {1}:
        raise ValueError(f"the collator made one row of {rows} examples: {PACKED}")
