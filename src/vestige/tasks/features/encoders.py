"""What does a frozen public encoder see in an image? Its features, computed once, on which a linear head is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vestige.mechanism.groups import head_of
from vestige.tasks.features.cache import cached, fastest
from vestige.tasks.features.starting_weights import Prior, read, start_from
from vestige.tasks.models import network

Encoder = Callable[[Tensor], Tensor]


def encoded(images: Tensor, checkpoint: str | Path) -> Tensor:
    """Features [N, size] of images in [-1, 1] by a frozen encoder: a file of `vestige prior make`, or the folder of a
    Hugging Face vision model. They are cached by the content of both.

    Formal guarantees: an image's features are a function of it and of the checkpoint, which must be public.
    """
    path = Path(checkpoint)
    identity = identity_of(path)
    made: list[Encoder] = []

    def compute(part: Tensor) -> Tensor:
        if not made:
            made.append(_from_prior(_prior(path), images) if path.is_file() else _from_folder(path))
        return made[0](part.to(fastest())).float()

    return cached(images, "encoder", identity, compute)


def identity_of(path: Path) -> str:
    """A hash of all files that decide what an encoder gives."""
    if path.is_file():
        return f"prior {_prior(path).content}"
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as content:
            while part := content.read(1 << 24):
                digest.update(part)
    return f"folder {digest.hexdigest()}"


def check_encoder(path: Path) -> None:
    """Refuse what is no encoder's checkpoint, before any image is read."""
    if path.is_file():
        _prior(path)
    else:
        _files(path)


def _files(path: Path) -> list[Path]:
    """Those of a folder that decide what its encoder gives."""
    if not path.is_dir():
        raise ValueError(f"features={str(path)!r}: there is no such file or folder; give a local checkpoint")
    files = sorted(each for each in path.iterdir() if each.suffix in (".json", ".safetensors", ".bin"))
    if not any(each.suffix != ".json" for each in files):
        raise ValueError(f"features={str(path)!r} holds no weights (.safetensors or .bin); give a saved checkpoint")
    return files


def _prior(path: Path) -> Prior:
    try:
        return read(path)
    except ValueError as error:
        raise ValueError(
            f"features={str(path)!r} is no encoder: give a file of `vestige prior make`, or the folder of a Hugging "
            "Face vision model"
        ) from error


def _from_prior(prior: Prior, images: Tensor) -> Encoder:
    model = network(prior.network, tuple(images.shape[1:]), 2)
    start_from(model, prior)
    return _without_head(model.eval().to(fastest()))


def _without_head(model: nn.Module) -> Encoder:
    _, head = head_of(model)
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0])

    head.register_forward_pre_hook(keep)

    def features(images: Tensor) -> Tensor:
        seen.clear()
        model(images)
        return seen[-1].flatten(1)

    return features


def _from_folder(folder: Path) -> Encoder:
    """A vision model of Hugging Face; its own code, if it has any, is not run."""
    if find_spec("transformers") is None:
        raise ValueError(f"features={str(folder)!r} needs transformers: pip install 'vestige[huggingface]'")
    from transformers import AutoModel

    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"features={str(folder)!r} is no checkpoint that transformers can load: {error}") from error
    model = getattr(model, "vision_model", model).eval().to(fastest())
    size = getattr(model.config, "image_size", 224)
    mean, deviation = _scaling(folder)

    def features(images: Tensor) -> Tensor:
        pixels = functional.interpolate(images / 2 + 0.5, size=(size, size), mode="bilinear", antialias=True)
        colour = pixels if pixels.shape[1] == 3 else pixels.expand(-1, 3, -1, -1)
        found = model(pixel_values=(colour - mean.to(colour)) / deviation.to(colour))
        pooled: Tensor | None = getattr(found, "pooler_output", None)
        return (found.last_hidden_state[:, 0] if pooled is None else pooled).flatten(1)

    return features


def _scaling(folder: Path) -> tuple[Tensor, Tensor]:
    """The mean and deviation that the checkpoint was trained with; one half each where it does not say."""
    file = folder / "preprocessor_config.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    mean, deviation = (said.get(key, [0.5] * 3) for key in ("image_mean", "image_std"))
    return torch.tensor(mean)[:, None, None], torch.tensor(deviation)[:, None, None]
