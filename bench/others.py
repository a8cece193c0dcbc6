"""Which models do people train? From other people's packages, built from their configurations, as their tutorials do.

A case is skipped where its package is not there. `small` ones have the same parts, for tests of exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vestige

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Other:
    """A model of somebody else's: how it is built, what it is given, and what its user makes of its outputs."""

    build: Callable[[bool], nn.Module]
    examples: Callable[[int, bool], Batch]
    loss: Callable[[Any, Batch], Tensor]
    batch: int
    labelled: bool = False
    """Whether it is called with its labels, and computes its loss itself."""
    longest: bool = False
    """Whether the texts of a batch are padded to the longest of them, and no further."""


# --- text -------------------------------------------------------------------------------------------------------------


def gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97, "n_positions": 16} if small else {}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def bert(small: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tiny = {**sizes, "vocab_size": 97, "max_position_embeddings": 16}
    return BertForSequenceClassification(BertConfig(**tiny if small else {}))


def llama_lora(small: bool, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny |= {"intermediate_size": 64, "vocab_size": 97, "max_position_embeddings": 16}
    large = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    large |= {"intermediate_size": 5632, "vocab_size": 32000}
    model = LlamaForCausalLM(LlamaConfig(**tiny if small else large))
    adapters = LoraConfig(r=4 if small else 8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return get_peft_model(model, adapters)


def mixtral(small: bool) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny |= {"intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 16, "num_local_experts": 4}
    large = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    large |= {"intermediate_size": 1024, "vocab_size": 32000, "num_local_experts": 8}
    return MixtralForCausalLM(MixtralConfig(**tiny if small else large))


def t5(small: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    tiny = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
    return T5ForConditionalGeneration(T5Config(**tiny if small else {}))


def whisper(small: bool) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    tiny = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
    tiny |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 97}
    tiny |= {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 8, "pad_token_id": 0}
    tiny |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**tiny if small else {}))


def tokens(length: int, vocabulary: int, size: int, small: bool) -> Batch:
    shape = (size, 12 if small else length)
    ids = torch.randint(97 if small else vocabulary, shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def labelled_tokens(length: int, vocabulary: int, size: int, small: bool) -> Batch:
    return {**tokens(length, vocabulary, size, small), "labels": torch.randint(2, (size,))}


def sentence_pairs(length: int, vocabulary: int, size: int, small: bool) -> Batch:
    """What an encoder reads, and what its decoder has written so far."""
    target = torch.randint(97 if small else vocabulary, (size, 7 if small else length))
    return {**tokens(length, vocabulary, size, small), "decoder_input_ids": target}


def speech(length: int, vocabulary: int, size: int, small: bool) -> Batch:
    sound = torch.randn(size, 8, 16) if small else torch.randn(size, 80, 3000)
    written = torch.randint(97 if small else vocabulary, (size, 7 if small else length))
    return {"input_features": sound, "decoder_input_ids": written}


def next_token_loss(outputs: Any, batch: Batch) -> Tensor:
    written = batch["decoder_input_ids"] if "decoder_input_ids" in batch else batch["input_ids"]
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), written[:, 1:].flatten())


def class_loss(outputs: Any, batch: Batch) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, batch["labels"])


# --- images -----------------------------------------------------------------------------------------------------------


def vit(small: bool) -> nn.Module:
    if small:
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes))
    from torchvision.models import vit_b_16

    return vit_b_16()


def resnet50(small: bool) -> nn.Module:
    """With GroupNorm: of torchvision's own making, or in BatchNorm's place."""
    if small:
        from transformers import ResNetConfig, ResNetForImageClassification

        sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
        return vestige.fix(ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10)))
    from torchvision.models import ResNet
    from torchvision.models.resnet import Bottleneck

    return ResNet(Bottleneck, [3, 4, 6, 3], norm_layer=partial(nn.GroupNorm, 32))


def convnext(small: bool) -> nn.Module:
    if small:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        config = ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], drop_path_rate=0.1, num_labels=10)
        return ConvNextForImageClassification(config)
    from torchvision.models import convnext_tiny

    return convnext_tiny()


def pixels(size: int, small: bool, tiny: int = 32) -> Batch:
    side = tiny if small else 224
    return {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.randint(10, (size,))}


OTHERS = {
    "GPT-2 124M": Other(gpt2, partial(tokens, 256, 50257), next_token_loss, 16),
    "BERT-base": Other(bert, partial(labelled_tokens, 128, 30522), class_loss, 32),
    "Llama 0.9B LoRA": Other(llama_lora, partial(tokens, 512, 32000), next_token_loss, 8),
    "Llama 0.9B DoRA": Other(partial(llama_lora, use_dora=True), partial(tokens, 512, 32000), next_token_loss, 8),
    "Mixtral 140M": Other(mixtral, partial(tokens, 256, 32000), next_token_loss, 16),
    "T5-small": Other(t5, partial(sentence_pairs, 128, 32128), next_token_loss, 32),
    "Whisper-tiny": Other(whisper, partial(speech, 64, 51865), next_token_loss, 16),
    "ViT-B/16": Other(vit, pixels, class_loss, 64),
    "ResNet-50 GN": Other(resnet50, partial(pixels, tiny=64), class_loss, 64),
    "ConvNeXt-T": Other(convnext, pixels, class_loss, 64),
}


def called(model: nn.Module, batch: Batch, labelled: bool = False) -> Any:
    """As users call such models: language models by names, image models and our own by position."""
    if labelled:
        return model(**batch)
    for name in ("pixel_values", "inputs"):
        if name in batch:
            return model(batch[name])
    return model(**{name: part for name, part in batch.items() if name != "labels"})
