"""Which processes train together, and what do they exchange? A group of processes, or one process alone.

Built on torch.distributed. Short messages go over a gloo group of their own, so that they never mix with the user's
collectives and have a time limit: a process that has ended, or has left the loop, ends the others instead of hanging
them. Sums and parameters go over the group that their device has (NCCL on GPUs).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vestige.priced_questions import BudgetSpent

T = TypeVar("T")
TIME_LIMIT = "VESTIGE_PROCESS_TIMEOUT"
"""Environment variable: how many seconds a process waits for the others' messages."""
SECONDS = 600.0


class Processes(Protocol):
    """The processes of one run, as each of them sees them. What is marked `Together` all of them must call, in the
    same order."""

    rank: int
    size: int
    several: bool
    """Whether sums go through collectives; a group of one process that torch knows is such a group."""

    def own(self, rows: Tensor) -> Tensor:
        """Those of these examples that are this process's: an example's process depends on its index alone."""
        ...

    def first(self, work: Callable[[], T]) -> T:
        """Collective: the result of this work in process 0, or its error."""
        ...

    def together(self, work: Callable[[], T]) -> T:
        """Together: each does work of its own, without messages; where one fails, all fail."""
        ...

    def agree(self, facts: Mapping[str, object]) -> None:
        """Together: raise ValueError where these facts are not the same everywhere."""
        ...

    def told(self, *numbers: int) -> list[list[int]]:
        """Together: some whole numbers of each process, by rank."""
        ...

    def same(self, number: int, otherwise: str) -> None:
        """Together: raise ValueError where this number is not the same everywhere, without naming it."""
        ...

    def any(self, holds: bool) -> bool:
        """Together: whether it holds in some process."""
        ...

    def total(self, numbers: Tensor) -> Tensor:
        """Together: a few numbers added up over the processes, in float64 and in the order of ranks: the same bits
        everywhere."""
        ...

    def scattered(self, vector: Tensor) -> Tensor:
        """Together: the sum over the processes of a vector, of which each gets its own part; the length is a multiple
        of their number."""
        ...

    def joined(self, part: Tensor) -> Tensor:
        """Together: the parts of all processes, one after the other."""
        ...

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Together: these tensors become those of process 0."""
        ...

    def secret(self) -> int:
        """Together: 256 random bits, drawn from the operating system by process 0. They are never written."""
        ...


class Alone:
    """One process: nothing is exchanged."""

    rank, size, several = 0, 1, False

    def own(self, rows: Tensor) -> Tensor:
        return rows

    def first(self, work: Callable[[], T]) -> T:
        return work()

    together = first

    def agree(self, facts: Mapping[str, object]) -> None:
        """One process agrees with itself."""

    def told(self, *numbers: int) -> list[list[int]]:
        return [list(numbers)]

    def same(self, number: int, otherwise: str) -> None:
        """One process agrees with itself."""

    def any(self, holds: bool) -> bool:
        return holds

    def total(self, numbers: Tensor) -> Tensor:
        return numbers.double()

    def scattered(self, vector: Tensor) -> Tensor:
        return vector

    def joined(self, part: Tensor) -> Tensor:
        return part

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """The tensors are process 0's already."""

    def secret(self) -> int:
        return secrets.randbits(256)


ALONE = Alone()


class Group:
    """The processes of torch's default group."""

    several = True

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        limit = timedelta(seconds=time_limit())
        with answered():
            self.words: Any = dist.new_group(backend="gloo", timeout=limit)
        self.sent = 0
        """Bytes of vectors that this process has sent so far, where collectives are rings: for measurements."""

    def own(self, rows: Tensor) -> Tensor:
        return rows[rows % self.size == self.rank]

    def first(self, work: Callable[[], T]) -> T:
        found: Any = None
        problem: Exception | None = None
        if self.rank == 0:
            try:
                found = work()
            except Exception as error:
                problem = error
        failed, found = self._said((problem is not None, _portable(problem) if problem is not None else found))
        if problem is not None:
            raise problem
        if failed:
            raise found
        return found  # type: ignore[no-any-return]

    def together(self, work: Callable[[], T]) -> T:
        problem: Exception | None = None
        try:
            found = work()
        except Exception as error:
            problem = error
        problems = self._all(None if problem is None else _portable(problem))
        if problem is not None:
            raise problem
        for rank, other in enumerate(problems):
            if other is not None:
                raise type(other)(f"process {rank}: {other}")
        return found

    def agree(self, facts: Mapping[str, Any]) -> None:
        mine = {key: json.dumps(value, sort_keys=True, default=repr) for key, value in facts.items()}
        others = self._all(mine)
        for key in {key: None for facts in others for key in facts}:
            value = others[0].get(key, "not given")
            for rank, facts in enumerate(others):
                other = facts.get(key, "not given")
                if other != value:
                    there, here = apart(other, value)
                    raise ValueError(
                        f"{key} is {there} in process {rank} and {here} in process 0: every process takes part in one "
                        "run, so start all of them with the same settings and data"
                    )

    def same(self, number: int, otherwise: str) -> None:
        found = [each for (each,) in self.told(number)]
        for rank, each in enumerate(found):
            if each != found[0]:
                raise ValueError(f"process {rank} and process 0: {otherwise}")

    def told(self, *numbers: int) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = torch.empty(self.size * len(numbers), dtype=torch.int64)
        with answered():
            _gather(found, mine, self.words)
        return found.view(self.size, -1).tolist()  # type: ignore[no-any-return]

    def any(self, holds: bool) -> bool:
        return any(flag for (flag,) in self.told(int(holds)))

    def total(self, numbers: Tensor) -> Tensor:
        flat = numbers.detach().double().cpu().reshape(-1).contiguous()
        found = torch.empty(self.size * len(flat), dtype=torch.float64)
        with answered():
            _gather(found, flat, self.words)
        summed = found.view(self.size, -1)[0].clone()
        for row in found.view(self.size, -1)[1:]:
            summed += row
        return summed.view(numbers.shape).to(numbers.device)

    def scattered(self, vector: Tensor) -> Tensor:
        assert len(vector) % self.size == 0
        self._count(vector.nbytes)
        sent, group = self._sendable(vector)
        part = torch.empty(len(vector) // self.size, dtype=vector.dtype, device=sent.device)
        with answered():
            _scatter(part, sent.contiguous(), group)
        return part.to(vector.device)

    def joined(self, part: Tensor) -> Tensor:
        self._count(part.nbytes * self.size)
        sent, group = self._sendable(part)
        whole = torch.empty(len(part) * self.size, dtype=part.dtype, device=sent.device)
        with answered():
            _gather(whole, sent.contiguous(), group)
        return whole.to(part.device)

    def follow(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            sent, group = self._sendable(tensor.detach().contiguous())
            with answered():
                dist.broadcast(sent, 0, group=group)
            if self.rank != 0:
                with torch.no_grad():
                    tensor.detach().copy_(sent)

    def secret(self) -> int:
        return int(self._said(secrets.randbits(256) if self.rank == 0 else None))

    def _count(self, bytes_of_all: int) -> None:
        self.sent += bytes_of_all * (self.size - 1) // self.size

    def _sendable(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor where a group can take it, and that group."""
        if tensor.device.type == "cpu":
            return tensor, self.words
        if "nccl" in dist.get_backend_config(self.world):
            return tensor, self.world
        return tensor.cpu(), self.words

    def _said(self, value: object) -> Any:
        box = [value]
        with answered():
            dist.broadcast_object_list(box, 0, group=self.words)
        return box[0]

    def _all(self, value: object) -> list[Any]:
        found: list[object] = [None] * self.size
        with answered():
            dist.all_gather_object(found, value, group=self.words)
        return found


class Lost(ConnectionError):
    """Another process of the run has ended, or did not answer in time."""


@contextmanager
def answered() -> Iterator[None]:
    """A collective that fails says in words what that means for the run."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Lost(
            f"another process of this run is gone, has failed, or did not answer within its time limit ({line[:160]}). "
            f"What was asked stays charged; resume from the last checkpoint. {TIME_LIMIT} sets the limit in seconds"
        ) from error


def time_limit() -> float:
    text = os.environ.get(TIME_LIMIT, str(SECONDS))
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ValueError(f"{TIME_LIMIT}={text!r} must be a positive number of seconds")
    return found


def digest(*parts: object) -> int:
    """A number of 63 bits that tells values apart which are written alike in every process."""
    text = json.dumps(parts, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


SHOWN = 80
"""Characters of a fact that a message has room for."""


def apart(*texts: str) -> tuple[str, ...]:
    """Of long texts that differ, the part where they begin to."""
    if max(map(len, texts)) <= SHOWN:
        return texts
    alike = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    start = max(0, alike - SHOWN // 4)
    return tuple(
        f"{'...' if start else ''}{text[start : start + SHOWN]}{'...' if len(text) > start + SHOWN else ''}"
        for text in texts
    )


def _portable(error: Exception) -> Exception:
    """An error that another process can raise: of a kind that it knows, in the same words."""
    for kind in (ValueError, OSError, BudgetSpent):
        if isinstance(error, kind):
            own = type(error)
            module = getattr(own, "__module__", "")
            return own(str(error)) if module.startswith("vestige") else kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


# Newer versions of torch have other names for the same collectives, and warn of the older ones.


def _gather(whole: Tensor, part: Tensor, group: object) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, part, group=group)


def _scatter(part: Tensor, vector: Tensor, group: object) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, vector, group=group)
