"""Which models was nothing tuned for? Others of transformers' and torchvision's, in loops as their tutorials write it:
`model(**batch).loss` where a model computes its loss itself.

Built from their configurations, at batch sizes of their own. Of transformers' models those that have another kind of
part than the rest: relative positions, convolutions over sound, layers skipped by chance, states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import vestige
from others import Batch, Other, class_loss

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 97}


def own_loss(outputs: Any, batch: Batch) -> Tensor:
    return outputs.loss  # type: ignore[no-any-return]


def transformers_model(
    name: str,
    large: dict[str, Any],
    small_options: dict[str, Any],
    fixed: bool,
    small: bool,
    lora: int = 0,
    checkpointed: bool = False,
) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**small_options if small else large))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    return vestige.fix(model) if fixed else model


def torchvision_model(name: str, small: bool) -> nn.Module:
    """With GroupNorm in BatchNorm's place."""
    from torchvision import models

    return vestige.fix(getattr(models, name)(num_classes=10))


class Recurrent(nn.Module):
    """A classifier of sentences as tutorials have it: an embedding, an LSTM, and the last state."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(vocabulary, 128), nn.LSTM(128, width, 2, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(input_ids))[0][:, -1])


def sentences(length: int, vocabulary: int, language: bool, mostly_short: bool, size: int, small: bool) -> Batch:
    """Of several lengths, padded; labelled by themselves or by a class."""
    length = 12 if small else length
    ids = torch.randint(5, 90 if small else vocabulary, (size, length))
    lengths = torch.randint(length // 2, length + 1, (size, 1))
    if mostly_short:
        lengths = (length * torch.rand(size, 1) ** 2).long().clamp(min=length // 8)
    mask = (torch.arange(length) < lengths).long()
    labels = ids.masked_fill(mask == 0, -100) if language else torch.randint(2, (size,))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sounds(size: int, small: bool) -> Batch:
    return {"input_values": torch.randn(size, 1600 if small else 16000), "labels": torch.randint(10, (size,))}


def images(side: int, tiny: int, size: int, small: bool) -> Batch:
    side = tiny if small else side
    return {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.randint(10, (size,))}


def text(
    name: str,
    batch: int,
    length: int,
    vocabulary: int,
    large: dict[str, Any] | None = None,
    tiny: dict[str, Any] | None = None,
    language: bool = False,
    lora: int = 0,
    longest: bool = False,
    checkpointed: bool = False,
) -> Other:
    small = {**TINY, **(tiny or {})}
    build: Callable[[bool], nn.Module] = lambda is_small: transformers_model(  # noqa: E731
        name, large or {}, small, False, is_small, lora, checkpointed
    )
    rows = partial(sentences, length, vocabulary, language, longest)
    return Other(build, rows, own_loss, batch, labelled=True, longest=longest)


def pictures(name: str, batch: int, large: dict[str, Any], tiny: dict[str, Any], fixed: bool = False) -> Other:
    many = {"num_labels": 10}
    build = partial(transformers_model, name, {**large, **many}, {**tiny, **many}, fixed)
    return Other(build, partial(images, 224, 32), own_loss, batch, labelled=True)


def vision(name: str, batch: int) -> Other:
    return Other(partial(torchvision_model, name), partial(images, 224, 64), class_loss, batch)


DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False, "position_buckets": 256,
}  # fmt: skip
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
QWEN = {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64,
    "intermediate_size": 2048, "vocab_size": 64000,
}  # fmt: skip
BEIT = {"use_relative_position_bias": True, "use_absolute_position_embeddings": False, "layer_scale_init_value": 0.1}
BEIT_TINY = {**{k: v for k, v in TINY.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 8}
SOUND = {"num_labels": 10, "layerdrop": 0.0, "mask_time_prob": 0.0}
SOUND_TINY = {
    **{**TINY, **SOUND}, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
TINY_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}

UNTUNED = {
    "DistilBERT": text("DistilBertForSequenceClassification", 48, 128, 30000, tiny=DISTIL),
    "RoBERTa-base": text("RobertaForSequenceClassification", 24, 256, 50000, {"vocab_size": 50265}),
    "DeBERTa-v3-base": text(
        "DebertaV2ForSequenceClassification", 16, 128, 120000, {**BASE, **DEBERTA, "vocab_size": 128100},
        {**DEBERTA, "position_buckets": 16},
    ),
    "ALBERT-base": text(
        "AlbertForSequenceClassification", 32, 128, 30000, {k: v for k, v in BASE.items() if "layers" not in k},
        {"embedding_size": 16},
    ),
    "OPT-125M": text("OPTForCausalLM", 12, 256, 50000, tiny=OPT, language=True),
    "Pythia-160M": text("GPTNeoXForCausalLM", 12, 256, 50000, {**BASE, "vocab_size": 50304}, language=True),
    "Qwen2-0.5B LoRA": text("Qwen2ForCausalLM", 6, 384, 150000, QWEN, {"num_key_value_heads": 1}, True, lora=16),
    "Qwen2-0.5B LoRA, checkpointed": text(
        "Qwen2ForCausalLM", 6, 384, 150000, QWEN, {"num_key_value_heads": 1}, True, lora=16, checkpointed=True
    ),
    "Gemma 80M": text("GemmaForCausalLM", 8, 256, 60000, GEMMA, {"num_key_value_heads": 1, "head_dim": 16}, True),
    "Mamba-130M": text("MambaForCausalLM", 4, 128, 50000, tiny={"state_size": 8}, language=True),
    "BERT-base, to the longest": text("BertForSequenceClassification", 24, 160, 30000, longest=True),
    "GPT-2, to the longest": text("GPT2LMHeadModel", 12, 192, 50000, tiny=TINY_GPT2, language=True, longest=True),
    "LSTM": Other(
        lambda small: Recurrent(97 if small else 10000, 16 if small else 256),
        partial(sentences, 128, 10000, False, False), class_loss, 64,
    ),
    "wav2vec 2.0": Other(
        partial(transformers_model, "Wav2Vec2ForSequenceClassification", SOUND, SOUND_TINY, False),
        sounds, own_loss, 8, labelled=True,
    ),
    "BEiT-base": pictures("BeitForImageClassification", 48, BEIT, {**BEIT, **BEIT_TINY}),
    "SegFormer-B0": pictures("SegformerForImageClassification", 48, {}, {}, fixed=True),
    "Swin-T": vision("swin_t", 48),
    "Swin-V2-T": vision("swin_v2_t", 48),
    "EfficientNet-B0": vision("efficientnet_b0", 96),
    "MobileNetV3-L": vision("mobilenet_v3_large", 96),
    "ResNet-18 224": vision("resnet18", 96),
    "DenseNet-121": vision("densenet121", 48),
    "RegNet-Y-1.6GF": vision("regnet_y_1_6gf", 64),
    "ShuffleNetV2": vision("shufflenet_v2_x1_0", 96),
}  # fmt: skip
