"""How are the rows of a dataset read? Each example by itself, and by workers before the step that needs it."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data import default_collate as torch_collate
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import BatchSampler

from vestige.mechanism.bad_rows import readable
from vestige.mechanism.losses.criteria import Form
from vestige.mechanism.text_padding import PaddedAlone

Collate = Callable[[list[Any]], object]
Group = list[Tensor]
"""A batch of examples of one shape: inputs and, last, targets."""
TARGETS = ("labels", "label")
"""The default name of the column of targets."""
SEED_BITS = 32
"""NumPy takes no longer ones."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How rows are read; the names and the meanings are those of torch's DataLoader."""

    collate_fn: Collate | None = None
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: object = None

    def __post_init__(self) -> None:
        if not (isinstance(self.num_workers, int) and self.num_workers >= 0):
            raise ValueError(
                f"num_workers={self.num_workers!r} must be a whole number from 0 up: 0 reads in this process"
            )
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ValueError(f"collate_fn={type(self.collate_fn).__name__} must be a function of a list of rows")

    @classmethod
    def of(cls, loader: DataLoader[object]) -> Loading:
        """As a user's loader reads them."""
        same = {field.name: getattr(loader, field.name) for field in fields(cls)}
        return cls(**{**same, "collate_fn": None if loader.collate_fn is torch_collate else loader.collate_fn})


def check_loader(loader: DataLoader[object], name: str = "data_loader") -> None:
    """Refuse loaders whose sampler would be replaced silently."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(f"{name} has an IterableDataset: a Poisson sample needs a dataset with indices")
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            f"{name} has a DistributedSampler: leave it out. Every process takes its own examples of one sample here, "
            "and batch_size is that of all processes together"
        )
    batches = batches_of(loader)
    if loader.batch_size is None and type(batches) is not BatchSampler:
        kind = type(batches or loader.sampler).__name__
        raise ValueError(
            f"{name} draws its batches by {kind}: they would be replaced by Poisson samples, in which every "
            "example is as likely. Give it a batch_size; the sampling rate is batch_size / len(dataset)"
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise ValueError(
            f"{name} has a {type(loader.sampler).__name__}: its order or weights would be replaced by Poisson "
            "samples, in which every example is as likely. Leave the sampler out; weigh classes in the loss instead"
        )
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.replacement:
        raise ValueError(f"{name} draws with replacement, which Poisson samples do not: leave replacement=True out")


def batches_of(loader: DataLoader[object]) -> Any:
    """The loader's own batches, inside those that Accelerate has dealt out to several processes."""
    batches: Any = loader.batch_sampler
    return batches.batch_sampler if type(batches).__name__ == "BatchSamplerShard" else batches


def rate_of(loader: DataLoader[object]) -> float:
    """Expected batch over dataset, exactly; not one over the number of batches."""
    dataset: Any = loader.dataset
    return min(1.0, (loader.batch_size or batches_of(loader).batch_size) / len(dataset))


# --- one example ------------------------------------------------------------------------------------------------------


Target = str | int | Sequence[str] | None
"""What the loss is given: a column, several of them, or how many of the last fields of a tuple; None: the usual one."""


def form_of(example: object, target: Target) -> Form:
    """How examples like this one are given to the model, and what of them to the loss."""
    if isinstance(example, Mapping):
        names = [str(name) for name in example]
        usual = next((name for name in TARGETS if name in names), None)
        keys = [usual if target is None else target] if target is None or isinstance(target, str | int) else [*target]
        for key in keys or [None]:
            if key not in names:
                asked = "say which of them the loss is given" if key is None else f"target={key!r} is none of them"
                raise ValueError(f"data: examples have the columns {', '.join(names)}; {asked}: target='...'")
        if len(names) <= len(keys):
            given = f"column {keys[0]!r}" if len(keys) == 1 else f"columns {', '.join(map(str, keys))}"
            raise ValueError(f"data: examples have the {given} only: the model is given nothing")
        return Form(tuple(name for name in names if name not in keys), str(keys[0]), tuple(map(str, keys[1:])))
    if target is not None and (not isinstance(target, int) or target < 1):
        raise ValueError(
            f"target={target!r} names a column, but examples are tuples: their last field is the target (target=2: "
            "the last two)"
        )
    count = target or 1
    if not isinstance(example, tuple | list) or len(example) <= count:
        fields = "target" if count == 1 else f"{count} targets"
        raise ValueError(
            f"data: an example is {_kind(example)}; it must be a tuple (inputs..., {fields}), or a dictionary of "
            "columns"
        )
    return Form(further=tuple(map(str, range(1, count))))


def fields_of(example: Any, form: Form) -> Sequence[object]:
    """The example's fields in the order of a batch: inputs, further targets and, last, the target."""
    if not hasattr(example, "__getitem__" if form.names is None else "keys"):
        raise ValueError(
            f"data: some examples are of type {type(example).__name__}, others "
            f"{'have fields in order' if form.names is None else 'have columns with names'}"
        )
    if form.names is None and form.further:
        inputs, (first, *others) = example[: -len(form.further) - 1], example[-len(form.further) - 1 :]
        return [*inputs, *others, first]
    if form.names is None:
        return example  # type: ignore[no-any-return]
    try:
        return [example[name] for name in (*form.names, *form.further, form.target)]
    except KeyError as missing:
        raise ValueError(f"data: some examples have no column {missing}, which others have") from None


def labels_of(form: Form, width: int) -> list[str]:
    """What the fields are called, for errors."""
    if form.names is None:
        return [f"field {place}" for place in range(width)]
    return [f"column {name!r}" for name in (*form.names, *form.further, form.target)]


def tensor_of(name: str, value: object) -> Tensor:
    """A field as a tensor. Numbers that are not torch's take torch's default precision."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            tensor = torch.as_tensor(array)
            return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor
    except (ValueError, TypeError):
        pass
    raise ValueError(
        f"data: {name} holds {_kind(value)}, which is no tensor: leave it out (of a Hugging Face dataset: "
        "dataset.remove_columns), or give a collate_fn that makes tensors of it"
    ) from None


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if not isinstance(value, list) else "a list that is no array of numbers"


# --- many of them -----------------------------------------------------------------------------------------------------


class RowByRow(Dataset[Any]):
    """A dataset whose rows are read one by one, also where it reads several together (`__getitems__`): it could pad or
    transform them by each other."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        return self.dataset[row]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def reads_together(dataset: Any) -> bool:
    """Whether torch's loaders read several rows of a dataset together."""
    return bool(getattr(dataset, "__getitems__", None))


def reads_lists(dataset: Any) -> bool:
    """Whether what it reads together are rows, which can as well be read one by one, rather than a batch."""
    if not reads_together(dataset) or not len(dataset):
        return False
    try:
        return isinstance(dataset.__getitems__([0]), list)
    except Exception:  # whatever a user's dataset raises for its first row
        return True


VOTES = 3
"""Rows by which the shapes of examples are known: one of them cannot decide alone."""


class Rows(Dataset[Any]):
    """SENSITIVE: the examples of a dataset, as batches of examples of one shape.

    Each example is collated alone, so whatever pads or shuffles it sees nothing of the others: how far an example is
    padded is its own. Examples that come out in the same shape are put together.
    """

    def __init__(self, dataset: Any, collate: Collate | None, target: Target) -> None:
        self.dataset, self.collate = dataset, collate
        self.population = len(dataset)
        self.blank: list[Tensor]
        """Tensors without rows: the shapes and dtypes of an example."""
        self.shielded = False
        """Whether rows that cannot be read are left out, once a made-up row has shown that the program is sound."""
        self.padding: PaddedAlone | None = None
        """How the texts of an example are padded, by their own length."""
        self._padded: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """The shapes of padded examples, by their own."""
        if self.population == 0:
            raise ValueError("data holds no examples")
        self._describe(target)

    def pad(self, padding: PaddedAlone) -> None:
        self.padding, self._padded = padding, {}

    def _describe(self, target: Target) -> None:
        """The form, names, shapes and dtypes of examples: those that most of the first three have that can be read."""
        found: list[tuple[Form, list[str], list[Tensor]]] = []
        first: Exception | None = None
        for row in range(self.population):
            try:
                example = self._collated(self._read([row])[0])
                self.form = form_of(example, target)
                self.labels = labels_of(self.form, len(example))
                blank = [_column([value])[:0] for value in self._values(example)]
            except Exception as error:  # whatever a user's dataset raises: one row must not decide
                first = first or error
                continue
            found.append((self.form, self.labels, blank))
            if len(found) == VOTES:
                break
        if not found:
            assert first is not None
            raise first
        kinds = [(str(form), *map(_shape, blank)) for form, _, blank in found]
        self.form, self.labels, self.blank = found[max(range(len(found)), key=lambda each: kinds.count(kinds[each]))]

    def __len__(self) -> int:
        return self.population

    def __getitems__(self, wanted: tuple[int | None, list[int]]) -> list[Group]:
        """For workers: the rows, with random numbers of this seed where one is given."""
        seed, rows = wanted
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
        return self.groups(rows)

    def groups(self, rows: Sequence[int]) -> list[Group]:
        if not rows:
            return [self.blank]
        alike: dict[tuple[object, ...], list[list[object]]] = {}
        for values in self._all_values(rows):
            alike.setdefault(self._shapes(values), []).append(values)
        return [self._columns(shapes, group) for shapes, group in alike.items()] or [self.blank]

    def _shapes(self, values: Sequence[object]) -> tuple[object, ...]:
        """Of an example's fields, its texts padded."""
        own = tuple(map(_shape, values))
        if self.padding is None:
            return own
        if own not in self._padded:
            to = self.padding.lengths(values)
            self._padded[own] = tuple(
                each if length is None else (torch.Size([length]), each[1])
                for each, length in zip(own, to, strict=True)
            )
        return self._padded[own]

    def _columns(self, shapes: Sequence[Any], group: Sequence[Sequence[Any]]) -> Group:
        columns = list(zip(*group, strict=True))
        if self.padding is None:
            return list(map(_column, columns))
        return [
            self.padding.stacked(place, column, *shape[0])
            if isinstance(column[0], Tensor) and column[0].dim() == 1
            else _column(column)
            for place, (column, shape) in enumerate(zip(columns, shapes, strict=True))
        ]

    def _all_values(self, rows: Sequence[int]) -> list[list[object]]:
        """Read together where the dataset can; one by one where that fails, without those that cannot be read."""
        try:
            return [self._values(self._collated(row)) for row in self._read(rows)]
        except Exception:  # whatever a user's dataset or collate_fn raises
            if not self.shielded:
                raise
            return readable(lambda row: self._fitting(self._values(self._collated(self._read([row])[0]))), rows)

    def _fitting(self, values: list[object]) -> list[object]:
        """Refuse a row that is of other kinds than the first."""
        for value, like in zip(values, self.blank, strict=True):
            if isinstance(value, Tensor) and (value.dim() + 1 != like.dim() or value.dtype != like.dtype):
                raise ValueError("data: some examples have other dimensions than the first")
        return values

    def _read(self, rows: Sequence[int]) -> Sequence[object]:
        """One by one: a dataset that reads several together may pad or transform them by each other."""
        return [self.dataset[row] for row in rows]

    def _collated(self, row: object) -> Any:
        return row if self.collate is None else self.collate([row])

    def _values(self, example: object) -> list[object]:
        """The example's fields: tensors, or plain numbers."""
        values = fields_of(example, self.form)
        if len(values) != len(self.labels):
            raise ValueError(f"data: some examples have {len(values)} fields, others {len(self.labels)}")
        if self.collate is not None:
            return [self._row(*each) for each in zip(self.labels, values, strict=True)]
        return [v if type(v) in PLAIN else tensor_of(name, v) for name, v in zip(self.labels, values, strict=True)]

    def _row(self, name: str, value: object) -> Tensor:
        """What a collate function made of one example."""
        tensor = tensor_of(name, value)
        if tensor.shape[:1] != (1,):
            raise ValueError(
                f"collate_fn made a tensor of shape {list(tensor.shape)} of {name} of one example: an example is one "
                "row of every tensor"
            )
        return tensor[0]


PLAIN = (Tensor, int, float, bool)


def _shape(value: object) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _column(values: Sequence[Any]) -> Tensor:
    return torch.stack(list(values)) if isinstance(values[0], Tensor) else torch.tensor(values)


class Ahead:
    """Batches that workers read before they are asked for: those of the samples that will be drawn next.

    `draw(index)` gives the sample of a question, in parts, and a seed for the workers' random numbers if the run must
    repeat. It depends on the index alone, so a sample may be drawn before its question is asked, and again then. What
    was read and is not asked for is dropped; what is asked for and was not foreseen is read here.
    """

    def __init__(
        self, rows: Rows, loading: Loading, draw: Callable[[int], tuple[Sequence[Tensor], int | None]]
    ) -> None:
        self._rows, self._loading, self._draw = rows, loading, draw
        self._sent: deque[tuple[int, Tensor]] = deque()
        self._batches: Iterator[list[Group]] | None = None

    def take(self, index: int, rows: Tensor) -> list[Group]:
        """The batches of a part of the sample of question `index`."""
        if self._loading.num_workers == 0:
            return self._rows.groups(rows.tolist())
        if self._batches is None:
            self._start(index)
        assert self._batches is not None
        while self._sent and self._sent[0][0] < index:
            self._next()
        if self._sent and self._sent[0][0] == index and torch.equal(self._sent[0][1], rows):
            return self._next()
        return self._rows.groups(rows.tolist())

    def close(self) -> None:
        """End the workers; the next batch starts others."""
        self._batches = None
        self._sent.clear()

    def _next(self) -> list[Group]:
        assert self._batches is not None
        found = next(self._batches)
        self._sent.popleft()
        return found

    def _start(self, index: int) -> None:
        loading = self._loading
        loader = DataLoader(
            self._rows,
            batch_sampler=_Foreseen(index, self._draw, self._sent),
            collate_fn=_as_they_are,
            num_workers=loading.num_workers,
            pin_memory=loading.pin_memory,
            prefetch_factor=loading.prefetch_factor,
            timeout=loading.timeout,
            worker_init_fn=_Quiet(loading.worker_init_fn),
            multiprocessing_context=loading.multiprocessing_context,
            generator=torch.Generator().manual_seed(random.SystemRandom().getrandbits(63)),
        )
        self._batches = iter(loader)


class _Foreseen(Sampler[Any]):
    """The parts of the samples from question `first` on, noted down as workers are sent for them."""

    def __init__(
        self,
        first: int,
        draw: Callable[[int], tuple[Sequence[Tensor], int | None]],
        sent: deque[tuple[int, Tensor]],
    ) -> None:
        self._first, self._draw, self._sent = first, draw, sent

    def __iter__(self) -> Iterator[tuple[int | None, list[int]]]:
        for index in count(self._first):
            parts, seed = self._draw(index)
            for number, rows in enumerate(parts):
                self._sent.append((index, rows))
                yield None if seed is None else (seed + number) % 2**SEED_BITS, rows.tolist()


def _as_they_are(groups: list[Group]) -> list[Group]:
    return groups


@dataclass(frozen=True)
class _Quiet:
    """Workers leave an interruption to the process that trains, which ends them."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)
