"""How is the state of a sharded run stored? Each process writes its rows, by torch.distributed.checkpoint.

Every tensor that is divided is stored parameter by parameter, as a DTensor: so another number of processes finds its
own rows again. What all processes have alike stays in one small file, in which each such tensor is replaced by what it
is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vestige.processes.group import answered
from vestige.processes.parameter_shards import Shards

MARK = "rows of"
WHOLE = "rows of a tensor of shape"
FLAT = ("memory", "probe", "average", "gradient")
"""The parts of a state whose vectors have one coordinate for each of a release."""


def save(folder: Path, content: Mapping[str, object], shards: Shards) -> dict[str, object]:
    """Together: write the divided tensors into a folder; what is left of the content, with marks in their places."""
    found: dict[str, object] = {}

    def mark(path: tuple[object, ...], tensor: Any) -> object:
        if hasattr(tensor, "placements"):  # a user's own module and optimizer have DTensors already
            key = "/".join(map(str, path))
            found[key] = tensor.detach()
            return {WHOLE: list(tensor.shape), "key": key, "kind": str(tensor.dtype)}
        names = _names(path, tensor, shards)
        if not names:
            return tensor
        key = "/".join(map(str, path))
        lead = tensor.shape[:-1] if len(names) > 1 or _flat(path) else ()
        for name, piece in _pieces(tensor, names, tuple(lead), shards).items():
            found[f"{key}/{name}"] = _divided(piece, name, tuple(lead), shards)
        return {MARK: names, "key": key, "lead": list(lead), "kind": str(tensor.dtype), "flat": _flat(path)}

    from torch.distributed import checkpoint as dcp  # here: it takes a second to import, and few runs are sharded

    left = _walked(dict(content), (), mark)
    with answered():
        dcp.save(found, checkpoint_id=folder, process_group=shards.group.words)  # type: ignore[attr-defined]
    return left  # type: ignore[no-any-return]


def load(folder: Path, left: Mapping[str, object], shards: Shards) -> dict[str, object]:
    """Together: the content again, of the rows that this process has now."""
    wanted: dict[str, Any] = {}

    def allocate(mark: Mapping[str, Any]) -> Tensor:
        lead, names = tuple(mark["lead"]), mark[MARK]
        kind = getattr(torch, mark["kind"].removeprefix("torch."))
        sizes = [prod(shards.rows_of(name).local_shape) for name in names]
        if mark["flat"]:
            whole = torch.zeros(*lead, sum(sizes), dtype=kind, device=shards.device)
        else:
            whole = torch.zeros(shards.rows_of(names[0]).local_shape, dtype=kind, device=shards.device)
        pieces = _pieces(whole, names, lead, shards)
        for name, piece in pieces.items():
            wanted[f"{mark['key']}/{name}"] = _divided(piece.contiguous(), name, lead, shards)
        filled.append((whole, mark, names, lead))
        return whole

    def divided(mark: Mapping[str, Any]) -> Any:
        from torch.distributed.tensor import Shard, zeros

        mesh: Any = next(iter(shards.model.parameters())).device_mesh  # type: ignore[attr-defined]
        kind = getattr(torch, mark["kind"].removeprefix("torch."))
        wanted[mark["key"]] = zeros(mark[WHOLE], dtype=kind, device_mesh=mesh, placements=[Shard(0)])
        return wanted[mark["key"]]

    filled: list[tuple[Tensor, Mapping[str, object], list[str], tuple[int, ...]]] = []
    from torch.distributed import checkpoint as dcp

    lengths = [prod(segment.shape) for segment in shards.local.segments]
    content = _unmarked(dict(left), lambda mark: (divided if WHOLE in mark else allocate)(mark), lengths)
    with answered():
        dcp.load(wanted, checkpoint_id=folder, process_group=shards.group.words)  # type: ignore[attr-defined]
    for whole, mark, names, lead in filled:
        for name, piece in _pieces(whole, names, lead, shards).items():
            piece.copy_(wanted[f"{mark['key']}/{name}"].to_local())
    return content  # type: ignore[no-any-return]


def _flat(path: tuple[object, ...]) -> bool:
    return "model" not in path and any(part in FLAT for part in path)


def _names(path: tuple[Any, ...], tensor: Tensor, shards: Shards) -> list[str]:
    """Of which parameters a tensor of the state has rows; none where all processes have it alike."""
    names = [segment.name for segment in shards.local.segments]
    if _flat(path):
        divided = tensor.dim() > 0 and tensor.shape[-1] >= shards.local.size and path[-1] not in ALIKE
        return names if divided else []
    if "model" in path:
        return [path[-1]] if path[-1] in names else []
    if "optimizer" in path and tensor.dim() > 0:
        return [names[path[-2]]]
    return []


ALIKE = ("squares", "products", "exponent", "tempering", "weights")
"""Numbers that memories keep of whole vectors."""


def _pieces(tensor: Tensor, names: list[str], lead: tuple[int, ...], shards: Shards) -> dict[str, Tensor]:
    """The rows of each parameter in a tensor, as views."""
    if not lead and tensor.shape == shards.rows_of(names[0]).local_shape and len(names) == 1:
        return {names[0]: tensor}
    pieces, start = {}, 0
    for name in names:
        shape = shards.rows_of(name).local_shape
        pieces[name] = (
            tensor[..., start : start + prod(shape)].unflatten(-1, shape)
            if prod(shape)
            else tensor.new_zeros(*lead, *shape)
        )
        start += prod(shape)
    return pieces


def _divided(local: Tensor, name: str, lead: tuple[int, ...], shards: Shards) -> object:
    from torch.distributed.tensor import DTensor, Shard

    mesh: Any = next(iter(shards.model.parameters())).device_mesh  # type: ignore[attr-defined]
    shape = torch.Size((*lead, *shards.rows_of(name).shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(len(lead))], run_check=False, shape=shape, stride=stride)


def _walked(value: object, path: tuple[object, ...], change: Callable[[tuple[object, ...], Tensor], object]) -> Any:
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: _walked(each, (*path, key), change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_walked(each, (*path, place), change) for place, each in enumerate(value))
    return value


def _unmarked(value: object, allocate: Callable[[Mapping[str, object]], Tensor], lengths: list[int]) -> Any:
    """With tensors in the places of marks, and the lengths of this process's rows where a memory keeps them."""
    if isinstance(value, dict):
        if MARK in value or WHOLE in value:
            return allocate(value)
        return {k: lengths if k == "lengths" else _unmarked(each, allocate, lengths) for k, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unmarked(each, allocate, lengths) for each in value)
    return value
