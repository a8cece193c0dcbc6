"""How is a Hugging Face checkpoint read from a folder, given adapters, and saved? Locally, and never with its code."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vestige.integrations.model_card import keep_base_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOCALLY: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
TASKS = {"classification": "SEQ_CLS", "causal-lm": "CAUSAL_LM"}
"""What peft calls them."""
SCALE = 2
"""LoRA's alpha over its rank."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.spm", "*.bpe.model")
UNBOUNDED = 10**9
"""A tokenizer without a largest length says one beyond this."""


@dataclass
class Checkpoint:
    """A model with its tokenizer."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    kind: str
    """What it is saved as: an "adapter", or a whole "model"."""
    use_cache: bool
    """As the checkpoint's configuration says; a cache is of no use in training."""

    def save(self, folder: Path) -> None:
        """As Hugging Face saves it."""
        config: Any = self.model.config
        config.use_cache, trained_with = self.use_cache, config.use_cache
        with quiet():
            self.model.save_pretrained(folder / self.kind)  # type: ignore[operator]
            self.tokenizer.save_pretrained(folder / self.kind)
            keep_base_config(self.model, folder / self.kind)
        config.use_cache = trained_with


def need(package: str, what: str) -> None:
    if find_spec(package) is None:
        raise ValueError(f"{what} needs {package}, which is not installed: pip install 'vestige[huggingface]'")


def read_configuration(folder: str) -> object:
    need("transformers", "fine-tuning")
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"model={folder!r} is no checkpoint: give a folder with a config.json in it")
    from transformers import AutoConfig

    with _told_of("model", folder, "its configuration cannot be read"):
        return AutoConfig.from_pretrained(folder, **LOCALLY)


def read_tokenizer(folder: str, pad_token: str | None) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, which pads; `pad_token` is one of its tokens, where it has none for that."""
    from transformers import AutoTokenizer

    if not any(True for pattern in VOCABULARIES for _ in Path(folder).glob(pattern)):
        raise ValueError(f"model={folder!r} has no tokenizer: save one there, such as a tokenizer.json")
    with _told_of("model", folder, "its tokenizer cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCALLY)
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"pad_token={pad_token!r} is no token of model={folder!r}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        end = tokenizer.eos_token
        way = f"choose one of its tokens, such as pad_token={end!r}" if end else "choose one of its tokens: pad_token="
        raise ValueError(f"model={folder!r} has no padding token: {way}")
    return tokenizer


def has_head(config: Any) -> bool:
    """Whether the checkpoint was saved with a head that tells classes apart."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def check_fits(folder: str, config: Any, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Refuse longer texts, or more tokens, than the model has places for."""
    places = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    most = min((each for each in places if each and each < UNBOUNDED), default=length)
    if length > most:
        raise ValueError(f"max_length={length} is more than the {most} tokens that model={folder!r} can take")
    if len(tokenizer) > getattr(config, "vocab_size", len(tokenizer)):
        raise ValueError(
            f"model={folder!r} has {config.vocab_size} embeddings, and its tokenizer {len(tokenizer)} tokens: they are "
            "not of one model"
        )


def read_model(folder: str, task: str, config: Any, names: Sequence[str], pad: int) -> tuple[nn.Module, list[str]]:
    """The model in float32, without dropout, and its modules that the checkpoint has no weights for: a new head.

    Noise regularises; masks of dropout on top of it would be one more, and keep a step from being recorded on a GPU.
    """
    import transformers

    classes: dict[str, Any] = {
        "classification": "AutoModelForSequenceClassification",
        "causal-lm": "AutoModelForCausalLM",
    }
    if task == "classification" and not has_head(config):
        config.num_labels = len(names)
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    if config.pad_token_id is None:
        config.pad_token_id = pad
    with _told_of("model", folder, f"it cannot be loaded for {task}"):
        model, found = getattr(transformers, classes[task]).from_pretrained(
            folder, config=config, output_loading_info=True, **LOCALLY
        )
    fresh = sorted({name.rpartition(".")[0] for name in found["missing_keys"]})
    if fresh and task == "causal-lm":
        raise ValueError(f"model={folder!r} has no weights for {fresh[0]}: it is no causal language model")
    return model.float().eval(), fresh


def with_lora(model: nn.Module, task: str, rank: int, targets: Sequence[str] | None, fresh: Sequence[str]) -> nn.Module:
    """The model with adapters to train; the rest is frozen, but for a head and what is new."""
    need("peft", f"lora={rank}")
    import peft

    if rank < 1:
        raise ValueError(f"lora={rank} must be a whole number from 1 up: it is the rank of the adapters")
    settings = peft.LoraConfig(
        task_type=TASKS[task],
        r=rank,
        lora_alpha=SCALE * rank,
        lora_dropout=0.0,
        target_modules=list(targets) if targets else None,
        modules_to_save=list(fresh) or None,
    )
    try:
        with quiet():
            return peft.get_peft_model(model, settings).eval()
    except ValueError as error:
        if targets is None:
            kind = type(model).__name__
            raise ValueError(f"lora_targets=None: peft has no choice for a {kind}; name its linear layers") from error
        raise ValueError(f"lora_targets={','.join(targets)!r}: the model has no such linear layers") from error


def frozen(model: nn.Module, patterns: str) -> None:
    """Freeze the parameters that one of the patterns names: 'transformer.wte*;transformer.h.0.*'."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns.split(";"):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"freeze={pattern!r} matches no parameter; the first are {', '.join(names[:3])}")
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split(";")):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze={patterns!r} leaves nothing to train")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the remarks and bars of others: a command's own lines are all it says."""
    import transformers

    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


@contextmanager
def _told_of(flag: str, folder: str, what: str) -> Iterator[None]:
    """Whatever goes wrong inside, in one line."""
    try:
        with quiet():
            yield
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{flag}={folder!r}: {what} ({line[:200]})") from error
