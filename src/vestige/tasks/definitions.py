"""Which tasks are there? What an example of a dataset becomes, and the model for examples of that shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from vestige.tasks import models
from vestige.tasks.datasets import CIFAR10, CIFAR100, DIGITS, FMNIST, IMDB, IMDB_BAGS, MNIST, SVHN, Dataset
from vestige.tasks.features.cached_scattering_features import scattered_colour, scattered_grey

GREY, COLOUR = (MNIST, FMNIST), (CIFAR10, CIFAR100, SVHN)
SCATTERING = "Features are normalised by GroupNorm(27), example by example: the data are asked nothing for it."


FROZEN = "Features are a function of one image and of a checkpoint, which must be public: the data are asked nothing."


@dataclass(frozen=True)
class Definition:
    """A task before its data are read."""

    dataset: Dataset
    model: str
    build: Callable[[tuple[int, ...], int], nn.Module]
    prepare: Callable[[Tensor], Tensor]
    notes: str = ""
    encoded: bool = False
    """Whether the model is one of features that a frozen encoder gives, whose checkpoint must be named."""


def _flat(images: Tensor) -> Tensor:
    return images.flatten(1)


def _as_is(examples: Tensor) -> Tensor:
    return examples


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.mlp(prod(shape), classes)


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.cnn(shape[0], shape[1], classes)


def _scattering_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return (models.scattering_cnn_7 if shape[1] == 7 else models.scattering_cnn_8)(shape[0], classes)


def _scattering_linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.scattering_linear(shape[0], shape[1], classes)


def _scattering_projected(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.scattering_projected(shape[0], shape[1], classes)


def _definitions() -> Iterator[tuple[str, Definition]]:
    for dataset in (DIGITS, *GREY, *COLOUR):
        yield f"{dataset.name}-mlp", Definition(dataset, "tanh MLP, hidden layers 64 and 32", _mlp, _flat)
    for dataset in (*GREY, *COLOUR):
        yield f"{dataset.name}-cnn", Definition(dataset, "small CNN: GroupNorm and tanh", _cnn, _as_is)
    for dataset in COLOUR:
        yield (
            f"{dataset.name}-resnet18",
            Definition(dataset, "ResNet-18, GroupNorm", models.NETWORKS["resnet18"], _as_is),
        )
        for depth in (16, 40):
            words = f"WRN-{depth}-4, GroupNorm, standardised weights"
            yield f"{dataset.name}-wrn{depth}-4", Definition(dataset, words, models.NETWORKS[f"wrn{depth}-4"], _as_is)
    for dataset in (*GREY, CIFAR10):
        network = models.tanh_cnn_28 if dataset in GREY else models.tanh_cnn_32
        yield f"{dataset.name}-ts", Definition(dataset, "DPSGD-TS's tanh CNN", _for_classes(network), _as_is)
    for dataset in (*GREY, CIFAR10):
        features = scattered_grey if dataset in GREY else scattered_colour
        cnn = Definition(dataset, "scattering features, CNN (DPSGD-HF)", _scattering_cnn, features, SCATTERING)
        linear = Definition(dataset, "scattering features, linear (DPSGD-HF)", _scattering_linear, features, SCATTERING)
        words = f"scattering features, projected to {models.NARROW}, linear (least squares)"
        squares = Definition(dataset, words, _scattering_projected, features, SCATTERING)
        yield from ((f"{dataset.name}-hf", cnn), (f"{dataset.name}-hf-linear", linear))
        yield f"{dataset.name}-hf-least-squares", squares
    for dataset in (*GREY, *COLOUR):
        words = "linear, on features of a frozen encoder (--features)"
        yield f"{dataset.name}-features", Definition(dataset, words, models.NETWORKS["linear"], _as_is, FROZEN, True)
    yield "imdb-words", Definition(IMDB_BAGS, "linear, on a bag of hashed words", models.bag_linear, _as_is)
    yield "imdb-lstm", Definition(IMDB, "embedding and bidirectional LSTM", _for_classes(models.TextClassifier), _as_is)


def _for_classes(network: Callable[[int], nn.Module]) -> Callable[[tuple[int, ...], int], nn.Module]:
    return lambda shape, classes: network(classes)


DEFINITIONS: dict[str, Definition] = dict(_definitions())
