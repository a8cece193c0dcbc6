"""What do the first steps of training cost in a user's own loop? Models of other people's, Poisson batches, from the
first step on.

The plain loop draws batches of the same law from the same data. What is done once, before the first step (trying the
model out, compiling, recording), is set-up and is told apart.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import vestige
from others import OTHERS, Batch, Other, called
from own import OWN
from untuned import UNTUNED
from vestige import PrivacyEngine
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson

TIMES = 20
"""How many expected batches the data hold."""
MODELS = OTHERS | UNTUNED | OWN
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], str]] = {
    "adamw": (torch.optim.AdamW, "dp-adamw"),
    "sgd": (torch.optim.SGD, "dp-sgd"),
}
"""What a loop of the user's moves by, and the method that is the same in `vestige.train`."""
Step = Callable[[], object]
Build = Callable[[Other, nn.Module, Batch, str], Step]


class Rows(Dataset[Any]):
    """Rows that lie on the device and are fetched together: what a loader itself costs is not the question here."""

    def __init__(self, parts: Batch, longest: bool = False) -> None:
        self.parts, self._longest = parts, longest

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> Batch:
        place = torch.tensor(rows, dtype=torch.long, device=next(iter(self.parts.values())).device)
        found = {name: part[place] for name, part in self.parts.items()}
        if self._longest and rows:
            length = int(found["attention_mask"].sum(dim=1).max())
            found = {name: part[:, :length] if part.dim() > 1 else part for name, part in found.items()}
        return found


def as_fetched(rows: Any) -> Any:
    return rows


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def poisson(data: Batch, longest: bool = False) -> DataLoader[Any]:
    """Batches of the sizes that private training has."""
    rows, key = Rows(data, longest), Randomness.reproducible(1)
    samples = [Poisson(1 / TIMES).draw(len(rows), step, key).tolist() or [0] for step in range(64)]
    return DataLoader(rows, batch_sampler=samples, collate_fn=as_fetched)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    return OPTIMIZERS[name][0](trainable(model), lr=1e-4)  # type: ignore[call-arg]


def plain(other: Other, model: nn.Module, data: Batch, optimizer: str) -> Step:
    return _loop(other, model, optimizer_of(model, optimizer), poisson(data, other.longest))


def privacy_engine(other: Other, model: nn.Module, data: Batch, name: str, record: bool = True) -> Step:
    optimizer = optimizer_of(model, name)
    rows = Rows(data, other.longest)
    loader = DataLoader(rows, batch_size=len(rows) // TIMES, collate_fn=as_fetched)
    _, _, loader = PrivacyEngine(cuda_graphs=record).make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    return _loop(other, model, optimizer, loader)


def unrecorded(other: Other, model: nn.Module, data: Batch, name: str) -> Step:
    return privacy_engine(other, model, data, name, record=False)


def opacus(mode: str) -> Build:
    def build(other: Other, model: nn.Module, data: Batch, name: str) -> Step:
        from opacus import PrivacyEngine as Opacus

        optimizer: Any = optimizer_of(model, name)
        loader: Any = poisson(data, other.longest)  # Opacus's own loader takes no rows with names
        made = Opacus(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode=mode, criterion=Criterion(other), poisson_sampling=False,
        )  # fmt: skip
        model, optimizer, criterion = made[:3] if mode == "ghost" else (*made[:2], Criterion(other))
        batches = chain.from_iterable(repeat(loader))

        def step() -> None:
            batch = next(batches)
            optimizer.zero_grad()
            criterion(called(model, batch, other.labelled), batch).backward()
            optimizer.step()

        return step

    return build


class Criterion(nn.Module):
    """A loss as Opacus wants it."""

    reduction = "mean"

    def __init__(self, other: Other) -> None:
        super().__init__()
        self.other = other

    def forward(self, outputs: Any, batch: Batch) -> Tensor:
        return self.other.loss(outputs, batch)


class Positional(nn.Module):
    """A model that is called by names, for `vestige.train`, which calls by position."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs = called(self.model, dict(zip(self.names, inputs, strict=True)))
        return outputs if isinstance(outputs, Tensor) else outputs.logits


def whole(other: Other, model: nn.Module, data: Batch, name: str) -> Step:
    """`vestige.train`: sampling, the step, the ledger and the record."""
    if other.labelled:
        raise ValueError("vestige.train takes a loss, and this model computes its own")
    names = [name for name in data if name != "labels"]
    target = "labels" if "labels" in data else "input_ids"

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return other.loss(outputs, {target: targets})

    options: dict[str, Any] = {"method": OPTIMIZERS[name][1], "noise_multiplier": 1.0, "delta": 1e-5, "lr": 1e-4}
    parts = (*(data[name] for name in names), data[target])
    run = vestige.train(Positional(model, names), loss, parts, sample_rate=1 / TIMES, steps=10**6, **options)
    records = iter(run)
    return lambda: next(records)


def _loop(other: Other, model: nn.Module, optimizer: Any, loader: Any) -> Step:
    batches = chain.from_iterable(repeat(loader))

    def step() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        other.loss(called(model, batch, other.labelled), batch).backward()
        optimizer.step()

    return step


LOOPS: dict[str, Build] = {
    "plain": plain,
    "Opacus hooks": opacus("hooks"),
    "Opacus ghost": opacus("ghost"),
    "ours, PrivacyEngine": privacy_engine,
    "ours, PrivacyEngine(cuda_graphs=False)": unrecorded,
    "ours, vestige.train": whole,
}


@dataclass(frozen=True)
class Cost:
    """Of the first steps: milliseconds a step, set-up apart, and GiB at the highest point."""

    ms: float
    first_ms: float
    setup_s: float
    gib: float | None


def measure(
    name: str, loop: str, device: str, steps: int, share: float = 1, small: bool = False, optimizer: str = "adamw"
) -> Cost:
    """The first so many steps of a loop on a model, at its batch, or one that is so many times smaller."""
    other = MODELS[name]
    torch.manual_seed(0)
    batch = batch_of(other, share)
    with torch.device(device):
        model, data = other.build(small).train(), other.examples(TIMES * batch, small)
    model.to(device)
    start = time.perf_counter()
    step = LOOPS[loop](other, model, {key: part.to(device) for key, part in data.items()}, optimizer)
    _wait(device)
    made = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with set_up(device) as spent:
        start = time.perf_counter()
        step()
        _wait(device)
        first = time.perf_counter() - start - spent[0]
        for _ in range(steps - 1):
            step()
        _wait(device)
        total = time.perf_counter() - start
    gib = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else None
    return Cost(1e3 * (total - spent[0]) / steps, 1e3 * first, made + spent[0], gib)


def batch_of(other: Other, share: float) -> int:
    return max(1, int(other.batch / share))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def set_up(device: str) -> Iterator[list[float]]:
    """What capturing takes, in seconds."""
    from vestige.engines import cuda_graphs
    from vestige.privacy_engine import captured_passes

    spent, nested = [0.0], [0]
    places = [(captured_passes.CapturedPasses, "_capture"), (cuda_graphs.Captured, "_capture")]
    before = [(place, key, getattr(place, key)) for place, key in places]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _wait(device)
            start = time.perf_counter()
            nested[0] += 1
            try:
                return original(*args, **kwargs)
            finally:
                _wait(device)
                nested[0] -= 1
                if not nested[0]:
                    spent[0] += time.perf_counter() - start

        return run

    try:
        for place, key, original in before:
            setattr(place, key, timed(original))
        yield spent
    finally:
        for place, key, original in before:
            setattr(place, key, original)


def costs(
    name: str, loops: list[str], device: str, steps: int, share: float = 1, optimizer: str = "adamw"
) -> Iterator[dict[str, Any]]:
    """A row for each loop, over the first of them."""
    base: Cost | None = None
    for loop in loops:
        row: dict[str, Any] = {"model": name, "loop": loop, "batch": batch_of(MODELS[name], share)}
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("default" if loop.startswith("ours") else "ignore")
                cost = measure(name, loop, device, steps, share, optimizer=optimizer)
            row["said"] = [f"{loop}: {one.message}" for one in said if issubclass(one.category, UserWarning)]
            base = base or cost
            row |= {**vars(cost), "time": cost.ms / base.ms}
            row["memory"] = cost.gib / base.gib if cost.gib and base.gib else None
        except ImportError as problem:
            row["failed"] = f"not installed: {problem.name}"
        except Exception as problem:  # of another library, anything
            row["failed"] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:100]}"
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        yield row


def table(
    names: list[str], loops: list[str], device: str, steps: int, share: float = 1, optimizer: str = "adamw"
) -> Iterator[dict[str, Any]]:
    """The rows of all models, printed as they come; then what we warned of."""
    print(
        "| model [batch] | loop | ms | time | first ms | set-up s | GiB | memory |\n|---|---|---|---|---|---|---|---|"
    )
    said: list[str] = []
    for name in names:
        for row in costs(name, loops, device, steps, share, optimizer):
            head = f"| {row['model']} [{row['batch']}] | {row['loop']} |"
            if "failed" in row:
                print(f"{head} {row['failed']} | | | | | |", flush=True)
            else:
                memory = f"{row['gib']:.2f} | {row['memory']:.2f}x" if row["gib"] else " | "
                times = f"{row['ms']:.2f} | {row['time']:.2f}x | {row['first_ms']:.0f} | {row['setup_s']:.1f}"
                print(f"{head} {times} | {memory} |", flush=True)
            yield row
            said += [f"{name}, {each}" for each in row.get("said", ())]
    print("\n" * bool(said) + "\n".join(said), end="\n" * bool(said))


def in_turn(
    names: list[str], loops: list[str], device: str, rounds: int, share: float = 1, optimizer: str = "adamw"
) -> Iterator[dict[str, Any]]:
    """Medians of a step, the loops in turn, so that a busy host is busy for all; the first steps are left out."""
    print("| model [batch] | loop | median ms | over the first | best |\n|---|---|---|---|---|")
    for name in names:
        other = MODELS[name]
        batch, steps = batch_of(other, share), dict[str, Step]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for loop in loops:
                torch.manual_seed(0)
                model = other.build(False).train().to(device)
                data = {key: part.to(device) for key, part in other.examples(TIMES * batch, False).items()}
                steps[loop] = LOOPS[loop](other, model, data, optimizer)
                _spent(steps[loop], device, 60)
            taken: dict[str, list[float]] = {loop: [] for loop in steps}
            for _ in range(rounds):
                for loop, step in steps.items():
                    taken[loop].append(_spent(step, device, 100))
        base = taken[loops[0]]
        for loop, times in taken.items():
            row = {"model": name, "batch": batch, "loop": loop, "ms": median(times)}
            row |= {"time": median(times) / median(base), "best": min(times) / min(base)}
            print(
                f"| {name} [{batch}] | {loop} | {row['ms']:.2f} | {row['time']:.2f}x | {row['best']:.2f}x |", flush=True
            )
            yield row


def _spent(step: Step, device: str, count: int) -> float:
    """Milliseconds a step."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return 1e3 * (time.perf_counter() - start) / count
