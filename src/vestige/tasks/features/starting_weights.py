"""Which weights may a private run start from? Those of a file that says what they were made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vestige.mechanism.groups import head_of

FORMAT = "vestige prior 1"


@dataclass(frozen=True)
class Prior:
    """Weights of a network without its head, and the statement of what they were made of."""

    network: str
    """As `models.NETWORKS` names it."""
    channels: int
    weights: Mapping[str, Tensor]
    statement: Mapping[str, object]
    """What the weights were made of, in plain values: the generator, how many of its images, the seed."""

    def save(self, path: Path) -> None:
        torch.save({"format": FORMAT, **{**asdict(self), "weights": dict(self.weights)}}, path)

    @property
    def content(self) -> str:
        """A hash of the weights, by name."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(f"{name} {tuple(self.weights[name].shape)}".encode())
            digest.update(self.weights[name].detach().cpu().contiguous().float().numpy().data)
        return digest.hexdigest()


def read(path: str | Path) -> Prior:
    """The prior of a file that `vestige prior make` wrote; nothing in it is executed."""
    refusal = f"prior={str(path)!r} is no file of `vestige prior make`"
    if not Path(path).is_file():
        raise ValueError(f"prior={str(path)!r}: there is no such file; make one with `vestige prior make`")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(refusal) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(refusal)
    return Prior(found["network"], found["channels"], found["weights"], found["statement"])


def body(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of all but the head, by name."""
    head, _ = head_of(model)
    return {name: value for name, value in model.state_dict().items() if not name.startswith(f"{head}.")}


@torch.no_grad()
def start_from(model: nn.Module, prior: Prior) -> None:
    """Put a prior's weights into a model; its head stays as it is.

    Formal guarantees: the weights are a function of the prior's file alone, which must be made of public or
    procedural data; then nothing is asked of the private data.
    """
    own = body(model)
    for name in sorted(own.keys() ^ prior.weights.keys()):
        raise ValueError(
            f"prior: {name!r} is in the model or in the prior, not in both; the prior is one for {prior.network}"
        )
    for name, value in own.items():
        if value.shape != prior.weights[name].shape:
            raise ValueError(
                f"prior: {name!r} has shape {tuple(value.shape)} in the model and {tuple(prior.weights[name].shape)} "
                f"in the prior, which is one for {prior.network} on {prior.channels} channels"
            )
        value.copy_(prior.weights[name])
