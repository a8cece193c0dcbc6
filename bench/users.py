"""What does a guarantee for a person cost, where one has several rows? Accuracy by mechanism, and time of a step.

    python bench/users.py svhn --data DATA --out OUT [--minutes 8] [--workers 12] [--seeds 20] [--steps N]
    python bench/users.py imdb --data DATA --out OUT ...
    python bench/users.py step --device cuda --out OUT [--tf32] [--steps 180] [--only MODEL]
    python bench/users.py table --out OUT [--page docs/results/users.md]

svhn: 5,000 crops of 2,777 photographs (`image_train` says which), a linear model of scattering features. imdb: 25,000
reviews as bags of hashed words, a linear model, and made-up authors of 1, 2, 4, 8 or 16 reviews, dealt twice: alike (by
rating, then by film) and unlike (at random). Epsilon 8 for a photograph, or an author; as many rows a step for each
mechanism. `automatic` is the automatic learning rate; `tuned` the best of some multiples of it, chosen by three other
seeds on half of the test rows (unpaid, and public), and judged, as all are, on the other half.

A run is one of `vestige.train(users=...)`; each adds a line to OUT/NAME.jsonl, so a command that was ended goes on
where it was, and one that has run for `--minutes` ends by itself. Runs go side by side in processes of one thread.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from vestige import accounting
from vestige.tasks.features.scattering_transform import Scattering
from vestige.tasks.read_reviews import bag_of_words

EPSILON, DELTA = 8.0, 1e-5
ROWS = {"svhn": 200, "imdb-alike": 500, "imdb-unlike": 500}
"""In a step, about."""
UNIT = {name: ("crop", "a photograph") if name == "svhn" else ("review", "an author") for name in ROWS}
MECHANISMS: dict[str, dict[str, Any]] = {
    "a row's guarantee (no users)": {"users": None},
    "rows, all": {},
    "rows, at most the median": {"rows_per_user": "median"},
    "rows, at most 1": {"rows_per_user": 1},
    "rows, cap 1": {"cap": 1},
    "users, mean of all": {"sample": "users"},
    "users, cap 2": {"sample": "users", "cap": 2},
    "users, cap 1": {"sample": "users", "cap": 1},
}
TRIED = (1.0, 2.0, 4.0, 8.0)
"""Multiples of the automatic rate."""
LENGTH = 8.0
"""Of a bag of words: much longer than the clip, so that nearly every gradient is clipped."""
TUNING_SEEDS = (100, 101, 102)
KEY = ("problem", "mechanism", "seed", "factor", "steps")

Row = dict[str, Any]


# --- data -------------------------------------------------------------------------------------------------------------


def prepared(name: str, data: Path, work: Path, device: str, workers: int) -> Path:
    """A folder of arrays for a problem, made once."""
    folder = work / name.split("-")[0]
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        arrays = svhn(data / "svhn_7k.npz", device) if name == "svhn" else imdb(data / "imdb.jsonl.gz", workers)
        for key, array in arrays.items():
            np.save(folder / f"{key}.npy", array)
        (folder / "done").touch()
    return folder


def svhn(file: Path, device: str) -> dict[str, np.ndarray]:
    """Scattering coefficients of each crop in grey, standardised by itself, then all of a crop together."""
    with np.load(file) as arrays:
        found = {key: arrays[key].astype(np.int64) for key in ("y_train", "y_test", "image_train")}
        images = {key: torch.from_numpy(arrays[key]) for key in ("x_train", "x_test")}
    scattering = Scattering(32, 32, device)
    for key, each in images.items():
        grey = each.float().mean(dim=3) / 255
        grey = (grey - grey.mean(dim=(1, 2), keepdim=True)) / (grey.std(dim=(1, 2), keepdim=True) + 0.05)
        wide = torch.cat([scattering(part.to(device)).flatten(1).cpu() for part in grey.split(500)])
        found[key] = nn.functional.layer_norm(wide, wide.shape[1:]).numpy()
    found["owners-svhn"] = found.pop("image_train")
    return found


def imdb(file: Path, workers: int) -> dict[str, np.ndarray]:
    """Bags of hashed words, and the reviews dealt to authors, in two ways."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        reviews = [json.loads(line) for line in lines]
    found: dict[str, np.ndarray] = {}
    with pool(workers) as processes:
        for split in ("train", "test"):
            own = [review for review in reviews if review["split"] == split]
            pieces = [[review["text"] for review in own[start : start + 500]] for start in range(0, len(own), 500)]
            found[f"x_{split}"] = np.concatenate(list(processes.map(bags, pieces)))
            found[f"y_{split}"] = np.array([review["label"] for review in own])
    own = [review for review in reviews if review["split"] == "train"]
    draw = np.random.default_rng(0)
    sizes = draw.choice([1, 2, 4, 8, 16], size=len(own))
    authors = np.repeat(np.arange(len(own)), sizes)[: len(own)]
    number = [
        int(review["id"].split("/")[-1].split("_")[0]) for review in own
    ]  # of train/pos/127_9: those of a film adjoin
    alike = sorted(range(len(own)), key=lambda place: (own[place]["rating"], number[place]))
    for way, order in (("alike", np.array(alike)), ("unlike", draw.permutation(len(own)))):
        found[f"owners-imdb-{way}"] = np.empty(len(own), dtype=np.int64)
        found[f"owners-imdb-{way}"][order] = authors
    return found


def bags(texts: Sequence[str]) -> np.ndarray:
    return LENGTH * torch.stack([bag_of_words(text) for text in texts]).numpy()


@cache
def opened(folder: Path) -> dict[str, torch.Tensor]:
    """The arrays of a folder, in memory that the processes share."""
    return {path.stem: torch.from_numpy(np.load(path, mmap_mode="c")) for path in folder.glob("*.npy")}


# --- one run ----------------------------------------------------------------------------------------------------------


def settings_of(problem: str, mechanism: str, owners: np.ndarray, steps: int) -> dict[str, Any]:
    """The arguments of a run: about as many rows in a step as of any other mechanism."""
    options = {"users": owners} | MECHANISMS[mechanism]
    counts = np.unique(owners, return_counts=True)[1]
    most = options.get("cap") if options.get("sample") == "users" else options.get("rows_per_user")
    most = counts.max() if most is None else max(1, int(np.median(counts))) if most == "median" else most
    rate = ROWS[problem] / int(np.minimum(counts, most).sum())
    return {"sample_rate": rate, "steps": steps, "delta": DELTA, "secure_mode": False, "device": "cpu"} | options


def planned(arrays: dict[str, torch.Tensor], seed: int, settings: dict[str, Any]) -> Any:
    """A run before its first question; initial weights are the seed's, samples and noise are nobody's."""
    inputs, targets = arrays["x_train"], arrays["y_train"]
    torch.manual_seed(seed)
    model = nn.Linear(inputs.shape[1], int(targets.max()) + 1)
    return vestige.train(model, nn.functional.cross_entropy, (inputs, targets), **settings)


@dataclass(frozen=True)
class Price:
    """What all runs of a mechanism may ask, and what that costs."""

    noise_multiplier: float
    epsilon: float
    adjacency: str
    history: str


def priced(problem: str, mechanism: str, folder: Path, steps: int) -> Row:
    """The noise of a mechanism at this epsilon."""
    silent()
    arrays = opened(folder)
    settings = settings_of(problem, mechanism, arrays[f"owners-{problem}"].numpy(), steps)
    plan = planned(arrays, 0, settings | {"epsilon": EPSILON})
    history = plan.ledger.budget.planned
    said = accounting.guarantee(history, DELTA, plan.facts)
    assert said.epsilon is not None
    known = {"noise_multiplier": plan.plan.noise_multiplier, "epsilon": said.epsilon, "adjacency": said.adjacency}
    return {"problem": problem, "mechanism": mechanism, "steps": steps, **known, "history": repr(dict(history))}


def trained(key: Sequence[Any], folder: Path, price: Price) -> Row:
    """One run, and its accuracy on either half of the test rows."""
    silent()
    problem, mechanism, seed, factor, steps = key
    arrays = opened(folder)
    settings = settings_of(problem, mechanism, arrays[f"owners-{problem}"].numpy(), steps)
    settings |= {"noise_multiplier": price.noise_multiplier}
    begun = time.monotonic()
    training = planned(arrays, seed, settings)
    if factor != 1.0:
        training = planned(arrays, seed, settings | {"lr": factor * training.plan.lr})
    for _ in training:
        pass
    assert repr(dict(training.ledger.spent)) == price.history, "a run asked something else than was priced"
    with torch.no_grad():
        right = (training.model(arrays["x_test"]).argmax(-1) == arrays["y_test"]).double()
    names = dict(zip(KEY, key, strict=True))
    return names | {
        "noise_multiplier": price.noise_multiplier,
        "noise_of_mean": price.noise_multiplier / training.expected_batch,
        "lr": training.plan.lr,
        "choosing": float(right[0::2].mean()),
        "judging": float(right[1::2].mean()),
        "seconds": time.monotonic() - begun,
    }


def silent() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


# --- all runs ---------------------------------------------------------------------------------------------------------


def pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=silent)


def due(done: list[Row], problem: str, seeds: int, steps: int) -> Iterator[tuple[Any, ...]]:
    """Automatic runs seed by seed, then tuning; the tuned runs of a mechanism when its tuning is over."""
    have = {_key(row) for row in done}
    automatic = [(problem, name, seed, 1.0, steps) for seed in range(seeds) for name in MECHANISMS]
    tuning = [(problem, name, seed, each, steps) for seed in TUNING_SEEDS for each in TRIED for name in MECHANISMS]
    best = {name: chosen(done, problem, name, steps) for name in MECHANISMS}
    tuned = [
        (problem, name, seed, each, steps) for seed in range(seeds) for name, each in best.items() if each is not None
    ]
    yield from (key for key in dict.fromkeys([*automatic, *tuning, *tuned]) if key not in have)


def chosen(done: list[Row], problem: str, name: str, steps: int) -> float | None:
    """Which multiple of the automatic rate was best for the tuning seeds; None before all have run."""
    found: dict[float, list[float]] = {}
    for row in done:
        if (row["problem"], row["mechanism"], row["steps"]) == (problem, name, steps) and row["seed"] in TUNING_SEEDS:
            found.setdefault(row["factor"], []).append(row["choosing"])
    if any(len(found.get(each, [])) < len(TUNING_SEEDS) for each in TRIED):
        return None
    return max(TRIED, key=lambda each: statistics.mean(found[each]))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def accuracies(arguments: argparse.Namespace, problems: Sequence[str]) -> None:
    """Run what is missing, side by side, until the time is over."""
    end = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder = prepared(problems[0], arguments.data, arguments.work, arguments.device, arguments.workers)
    with pool(arguments.workers) as processes:
        prices = all_prices(processes, problems, folder, arguments)
        for problem in problems:
            run_due(processes, problem, folder, prices, arguments, end)
        processes.shutdown(cancel_futures=True)
    print(tables(arguments.out))


def all_prices(
    processes: ProcessPoolExecutor, problems: Sequence[str], folder: Path, arguments: argparse.Namespace
) -> dict[tuple[str, str], Price]:
    path, steps = arguments.out / "prices.jsonl", arguments.steps
    known = {(row["problem"], row["mechanism"], row["steps"]) for row in read(path)}
    missing = [(problem, name) for problem in problems for name in MECHANISMS if (problem, name, steps) not in known]
    for future in [processes.submit(priced, problem, name, folder, steps) for problem, name in missing]:
        append(path, future.result())
    fields = ("noise_multiplier", "epsilon", "adjacency", "history")
    return {
        (row["problem"], row["mechanism"]): Price(*(row[field] for field in fields))
        for row in read(path)
        if row["steps"] == steps
    }


def run_due(
    processes: ProcessPoolExecutor,
    problem: str,
    folder: Path,
    prices: dict[tuple[str, str], Price],
    arguments: argparse.Namespace,
    end: float,
) -> None:
    path = arguments.out / f"{problem}.jsonl"
    done, running = read(path), dict[Future[Row], tuple[Any, ...]]()
    while True:
        under_way = set(running.values())
        waiting = (key for key in due(done, problem, arguments.seeds, arguments.steps) if key not in under_way)
        while time.monotonic() < end and len(running) < 2 * arguments.workers and (key := next(waiting, None)):
            running[processes.submit(trained, key, folder, prices[problem, key[1]])] = key
        if not running:
            return
        for future in wait(running, timeout=5, return_when=FIRST_COMPLETED).done:
            del running[future]
            done.append(future.result())
            append(path, done[-1])
        if time.monotonic() >= end:
            for future in [each for each in running if each.cancel()]:
                del running[future]
        print(f"\r{problem}: {len(done)} runs", end="", flush=True)


# --- time of a step ---------------------------------------------------------------------------------------------------


def networks(device: str) -> Iterator[tuple[str, nn.Module, tuple[int, ...], int]]:
    """A name, a model, the shape of a row, and rows in a step."""
    few = device == "cpu"
    yield "MLP 3072-1024-1024-10", perceptron(), (3072,), 64 if few else 1024
    yield "CNN, 32 px, GroupNorm", convolutions(), (3, 32, 32), 32 if few else 512
    yield "Transformer, 4 x 256, 64 positions", Encoder(), (64, 256), 16 if few else 256


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 10))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(256, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(inputs).mean(dim=1))


def step_times(arguments: argparse.Namespace) -> None:
    """A step on samples of users beside one on samples of rows, with as many rows: milliseconds, in turns."""
    warnings.simplefilter("ignore")
    if arguments.tf32:
        torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    for name, _, _, rows in networks(arguments.device):
        if arguments.only not in name:
            continue
        population = 20 * rows
        for counts in ((4,), (1, 2, 3, 4)):
            if time.monotonic() > end:
                return
            users = np.repeat(np.arange(population), np.resize(counts, population))[:population]
            found = compared(name, users, arguments, end)
            row = {"model": name, "rows": rows, "rows of a user": list(counts), "device": kind(arguments.device)}
            row["tf32"] = arguments.tf32
            append(arguments.out / "steps.jsonl", row | found)
            print(json.dumps(row | found), flush=True)


def compared(name: str, users: np.ndarray, arguments: argparse.Namespace, end: float) -> dict[str, float]:
    """Milliseconds of each kind of step, and ratios: by `vestige.train`, and in a loop of one's own.

    A loop follows every operator of its process as long as it lives, so each has a process of its own."""
    by_users = {"users": users, "sample": "users"}
    warm, device, tf32 = 1 if arguments.device == "cpu" else 30, arguments.device, arguments.tf32
    apart = {"loop rows": Apart(name, device, tf32), "loop users": Apart(name, device, tf32, **by_users)}
    given = problem(name, device)
    own = {"rows": trained_steps(*given), "users": trained_steps(*given, **by_users)}
    means = in_turns({name: partial(taken, each, arguments.device) for name, each in own.items()}, warm, arguments, end)
    for each in own.values():
        each.close()  # type: ignore[attr-defined]
    means |= in_turns({name: each.taken for name, each in apart.items()}, warm, arguments, end)
    for other in apart.values():
        other.close()
    ratios = {"ratio": means["users"] / means["rows"], "loop ratio": means["loop users"] / means["loop rows"]}
    return {f"{name} ms": each for name, each in means.items()} | ratios


def problem(name: str, device: str) -> tuple[nn.Module, Any, int, str]:
    model, shape, rows = next(found for each, *found in networks(device) if each == name)
    return model, (torch.randn(20 * rows, *shape), torch.randint(10, (20 * rows,))), rows, device


def in_turns(
    runs: dict[str, Callable[[int], list[float]]], warm: int, arguments: argparse.Namespace, end: float
) -> dict[str, float]:
    """Mean milliseconds of a step of each run, each of which takes so many: in turns, so that what else the machine
    does falls on all of them."""
    measured = 2 if arguments.device == "cpu" else -(-arguments.steps // 6)
    found: dict[str, list[float]] = {name: run(warm)[:0] for name, run in runs.items()}
    for turn in range(6):
        for name, run in runs.items():
            found[name] += run(2 + measured)[2:]
        if time.monotonic() > end and turn > 0:
            break
    return {name: statistics.mean(each) for name, each in found.items()}


def taken(run: Iterator[Any], device: str, steps: int) -> list[float]:
    """The milliseconds of so many steps."""
    found = []
    for _ in range(steps):
        begun = time.monotonic()
        next(run)
        synchronise(device)
        found.append(1000 * (time.monotonic() - begun))
    return found


class Apart:
    """A loop in a process of its own."""

    def __init__(self, name: str, device: str, tf32: bool, **options: Any) -> None:
        context = get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=looping, args=(there, name, device, tf32, options), daemon=True)
        self._process.start()

    def taken(self, steps: int) -> list[float]:
        self._pipe.send(steps)
        found: list[float] = self._pipe.recv()
        return found

    def close(self) -> None:
        self._pipe.send(0)
        self._process.join()


def looping(pipe: Any, name: str, device: str, tf32: bool, options: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    if tf32:
        torch.set_float32_matmul_precision("high")
    run = loop_steps(*problem(name, device), **options)
    while steps := pipe.recv():
        pipe.send(taken(run, device, steps))


def trained_steps(model: nn.Module, data: Any, rows: int, device: str, **options: Any) -> Iterator[Any]:
    settings = {"sample_rate": rows / len(data[0]), "steps": 10**6, "noise_multiplier": 1.0, "delta": 1e-9, "lr": 1e-3}
    own = copy.deepcopy(model)
    yield from vestige.train(own, nn.functional.cross_entropy, data, device=device, **(settings | options))


def loop_steps(model: nn.Module, data: Any, rows: int, device: str, **options: Any) -> Iterator[Any]:
    own, engine = copy.deepcopy(model).to(device), vestige.PrivacyEngine()
    loader = DataLoader(OnDevice(*(part.to(device) for part in data)), batch_size=rows, collate_fn=as_it_is)
    own, optimizer, loader = engine.make_private(
        module=own, optimizer=torch.optim.SGD(own.parameters(), lr=1e-3), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, **options,
    )  # fmt: skip
    try:
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(own(inputs), targets).backward()
                optimizer.step()
                yield None
    finally:
        engine.close()


class OnDevice(TensorDataset):
    """Rows of a batch are read at once, where they are."""

    def __getitems__(self, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(part[torch.tensor(rows, device=part.device)] for part in self.tensors)


def as_it_is(batch: Any) -> Any:
    return batch


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def kind(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


# --- what is shown ----------------------------------------------------------------------------------------------------


def tables(out: Path) -> str:
    found = [table(read(out / f"{problem}.jsonl"), read(out / "prices.jsonl"), problem) for problem in ROWS]
    return "\n\n".join([each for each in (*found, step_table(read(out / "steps.jsonl"))) if each])


def table(done: list[Row], prices: list[Row], problem: str) -> str:
    if not done:
        return ""
    steps = max(row["steps"] for row in done)
    costs = {row["mechanism"]: row for row in prices if (row["problem"], row["steps"]) == (problem, steps)}
    row_name, owner = UNIT[problem]
    lines = [
        f"### {problem}: {steps} steps of about {ROWS[problem]} {row_name}s, delta {DELTA:g}",
        "",
        "| mechanism | epsilon | for | noise z | noise of a mean | automatic | tuned | at the multiple |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in MECHANISMS:
        own = [row for row in done if (row["mechanism"], row["steps"]) == (name, steps) and row["seed"] < 100]
        auto = [row for row in own if row["factor"] == 1.0]
        if not auto:
            continue
        best = chosen(done, problem, name, steps)
        tuned = [row for row in own if row["factor"] == best]
        whose = f"a {row_name}" if MECHANISMS[name].get("users", owner) is None else owner
        at = "" if best is None else f"{best:g}"
        lines.append(
            f"| {name} | {costs[name]['epsilon']:.2f} | {whose} | {auto[0]['noise_multiplier']:.2f} | "
            f"{auto[0]['noise_of_mean']:.4f} | {spread(auto)} | {spread(tuned)} | {at} |"
        )
    return "\n".join(lines)


def spread(rows: list[Row]) -> str:
    """Percent right, the deviation of the mean's estimate, and how many seeds."""
    found = [100 * row["judging"] for row in rows]
    if len(found) < 2:
        return "not run"
    return f"{statistics.mean(found):.1f} ± {statistics.stdev(found) / len(found) ** 0.5:.1f} ({len(found)} seeds)"


def step_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    lines = [
        f"### A step on {rows[-1]['device']}, milliseconds",
        "",
        "| model | rows in a step | rows of a user | `train`, rows | users | ratio | loop, rows | users | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    latest = {(row["model"], str(row["rows of a user"]), row.get("tf32", False)): row for row in rows}
    for row in latest.values():
        counts = ", ".join(map(str, row["rows of a user"]))
        cells = [f"{row[f'{name} ms']:.2f}" for name in ("rows", "users", "loop rows", "loop users")]
        cells.insert(2, f"{row['ratio']:.2f}")
        whole = [
            row["model"] + (" (TF32)" if row.get("tf32") else ""),
            str(row["rows"]),
            counts,
            *cells,
            f"{row['loop ratio']:.2f}",
        ]
        lines.append(f"| {' | '.join(whole)} |")
    return "\n".join(lines)


PAGE = """# What a guarantee for a person costs

```
python bench/users.py svhn --data DATA --out OUT
python bench/users.py imdb --data DATA --out OUT
python bench/users.py step --device cuda --out OUT
python bench/users.py table --out OUT --page docs/results/users.md
```

Written by the last of these; the first lines of the script say what the others do. Accuracy in percent on half of the
test rows, with the deviation of its mean over seeds. The first line of a table protects one row only; the others
protect all rows of one person. Learning rates are tuned by the other half, among 1, 2, 4 and 8 times the automatic one.
[What the mechanisms are](../users.md#which-mechanism).
"""


def show(arguments: argparse.Namespace) -> None:
    found = tables(arguments.out)
    if arguments.page is not None:
        arguments.page.write_text(f"{PAGE}\n{found.replace('### ', '## ')}\n")
    print(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    parts = {name: commands.add_parser(name) for name in ("svhn", "imdb", "step", "table")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name, each in parts.items():
        each.add_argument("--out", type=Path, required=True)
        if name != "table":
            each.add_argument("--minutes", type=float, default=60.0)
            each.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("svhn", "imdb"):
        parts[name].add_argument("--data", type=Path, required=True)
        parts[name].add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vestige-bench-users")
        parts[name].add_argument("--seeds", type=int, default=20)
        parts[name].add_argument("--steps", type=int, default={"svhn": 300, "imdb": 200}[name])
        parts[name].add_argument("--workers", type=int, default=max(1, cores - 2))
    parts["step"].add_argument(
        "--tf32", action="store_true", help="matrix products in TF32, as docs/benchmarks.md has them"
    )
    parts["step"].add_argument("--steps", type=int, default=180, help="steps that are measured of each kind, on a GPU")
    parts["step"].add_argument("--only", default="", metavar="MODEL", help="a model whose name has this, such as CNN")
    parts["table"].add_argument("--page", type=Path)
    parts["svhn"].set_defaults(call=lambda arguments: accuracies(arguments, ["svhn"]))
    parts["imdb"].set_defaults(call=lambda arguments: accuracies(arguments, ["imdb-alike", "imdb-unlike"]))
    parts["step"].set_defaults(call=step_times)
    parts["table"].set_defaults(call=show)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
