"""What do balanced steps cost, and which constants are the right ones? Step times in one run, and a study of the rule.

    python bench/balance.py cost --out bench/results/balance [--device cuda] [--steps 30]
    python bench/balance.py rules --data DATA --out bench/results/balance [--device cuda] [--small]
    python bench/balance.py kinds --data DATA --out bench/results/balance [--small]
    python bench/balance.py models --data DATA --out bench/results/balance [--device cuda] [--only NAME ...] [--small]
    python bench/balance.py pairs --out bench/results/arena
    vestige reproduce balance-fo --data DATA [--small]

`cost`: the median step time with balanced steps over that without, methods and models by turns in one run, so that a
slow moment of the machine hits both. `rules`: stacked MLPs at a grid of c, the number of norms of the initial weights
that noise may walk, for each rule of constants; it can be killed and started again. Accuracies are on public test data,
and the best of a grid is flattered by choosing. `kinds`: the same for LoRA, norm layers, convolutions and embeddings,
one small network each. `models`: DPSGD-TS's tanh CNN, a GroupNorm CNN and a small transformer with LayerNorm at two
budgets, a grid of rates, several seeds. `pairs`: a table of every comparison in a folder (`bench/arena.py --only
balance-...`), each method with balanced steps against itself without, seed by seed, corrected together. The last is
the arena by the command: the FO-DP-SGD paper's protocol, each method with and without.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vestige
from vestige import accounting, tasks
from vestige.compare.folder import ComparisonFolder
from vestige.compare.stacked import Stack, StackedRun
from vestige.compare.statistics import ALPHA, holm, paired, summarise
from vestige.layerwise_scaling import Constants, Relative
from vestige.methods.registry import make_method
from vestige.run_records import completed
from vestige.tasks.models import mlp, tanh_cnn_32
from vestige.training import planning
from vestige.training.automatic_rate import WALK

METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "dp-sgd by layers": {"groups": "layers"},
    "dp-adamw": {},
    "fo-dp-sgd": {},
}

# --- what a step costs -----------------------------------------------------------------------------------------------


def subjects(examples: int) -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(examples, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (examples,), generator=generator)
    return {
        "mlp": (partial(mlp, 3072, 10), (images.flatten(1), labels)),
        "tanh cnn": (partial(tanh_cnn_32, 10), (images, labels)),
    }


def records_of(name: str, balance: str, make: Callable[[], nn.Module], data: Any, steps: int, device: str) -> Any:
    torch.manual_seed(0)
    method = make_method(name.split(" ")[0], balance=balance, **METHODS[name])
    run = vestige.train(
        make().to(device), nn.functional.cross_entropy, data, method=method, sample_rate=256 / len(data[1]),
        steps=steps, noise_multiplier=1.1, delta=1e-6, lr=0.01, reproducible=0,
    )  # fmt: skip
    return iter(run)


def timed(records: Iterator[Any], device: str) -> float:
    """Seconds of a step; on a CPU those that this process had, so that others on the machine do not count."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    begin = clock()
    next(records)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return clock() - begin


def costs(steps: int, examples: int, device: str, models: Sequence[str]) -> list[dict[str, Any]]:
    """Both draw the same samples (reproducible runs), so that a step is compared with the same step."""
    rows, warm = [], 3
    for model, (make, data) in subjects(examples).items():
        if model not in models:
            continue
        for name in METHODS:
            both = {kind: records_of(name, kind, make, data, steps + warm, device) for kind in ("plain", "relative")}
            times: dict[str, list[float]] = {kind: [] for kind in both}
            for step in range(steps + warm):
                for kind in sorted(both, reverse=bool(step % 2)):
                    times[kind].append(timed(both[kind], device))
            plain = statistics.median(times["plain"][warm:])
            pairs = [b / a for a, b in zip(times["plain"][warm:], times["relative"][warm:], strict=True)]
            rows.append({"model": model, "method": name, "plain_ms": 1e3 * plain, "ratio": statistics.median(pairs)})
            print(f"{model:9s} {name:17s} {1e3 * plain:8.2f} ms  x {rows[-1]['ratio']:.4f}", flush=True)
    return rows


# --- which constants -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coarse:
    """The same as `Relative`, to the nearest power of two, with which W = a V is exact."""

    def __call__(self, model: nn.Module) -> Constants:
        return {name: 2.0 ** round(log2(constant)) for name, constant in Relative()(model).items()}


@dataclass(frozen=True)
class OwnBias:
    """A bias has the constant of its layer's weight."""

    def __call__(self, model: nn.Module) -> Constants:
        found = Relative()(model)
        return {name: found[name.replace("bias", "weight")] for name in found}


RULES: dict[str, Any] = {"plain": None, "relative": Relative(), "powers of two": Coarse(), "own bias": OwnBias()}
WALKS = (0.6, 1.2, 2.0, 3.0, 4.8, 9.6)
BOTH = ("plain", "relative")
SETTINGS: list[tuple[str, float, int, float, Sequence[str]]] = [
    ("svhn-mlp", 8.0, 300, 0.04, tuple(RULES)),
    ("digits-mlp", 3.0, 200, 0.05, tuple(RULES)),
    ("cifar10-mlp", 8.0, 200, 0.04, BOTH),
    ("svhn-mlp", 3.0, 200, 0.04, BOTH),
    ("cifar10-mlp", 1.0, 200, 0.04, BOTH),
    ("cifar100-mlp", 8.0, 200, 0.04, BOTH),
    ("mnist-mlp", 1.0, 200, 0.004, BOTH),
]


def studied(
    task: str,
    epsilon: float,
    steps: int,
    rate: float,
    names: Sequence[str],
    data: str | None,
    seeds: Sequence[int],
    device: str,
) -> list[dict[str, Any]]:
    where = None if task == "digits-mlp" else data
    loaded = tasks.load(task, where)
    population, delta = len(loaded.train[1]), 1e-5
    method = make_method("dp-sgd")
    z = accounting.calibrate(partial(planning.questions, method, rate, steps=steps), epsilon, delta)
    starts = {seed: tasks.load(task, where, seed).model for seed in seeds}
    runs, labels = [], []
    for rule in names:
        balance = RULES[rule]
        mine = replace(method, balance=balance)
        for seed in seeds:
            model = starts[seed]
            lr, _ = planning.choose_rate(model, mine.layout(model), mine, population, rate, z, steps, "auto")
            for walk in WALKS:
                own = lr * walk / WALK
                runs.append(StackedRun(copy.deepcopy(model), mine, z, own))
                labels.append((rule, seed, walk))
    rows = []
    for first in range(0, len(runs), 12):
        part = slice(first, first + 12)
        stack = Stack(runs[part], loaded.train, sample_rate=rate, steps=steps, device=torch.device(device))
        for _ in stack.train():
            pass
        for (rule, seed, walk), accuracy in zip(labels[part], stack.accuracies(loaded.test), strict=True):
            rows.append({"task": task, "epsilon": epsilon, "steps": steps, "rule": rule, "seed": seed, "c": walk,
                         "accuracy": accuracy})  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The mean over seeds, in percent, by rule and c."""
    walks = sorted({row["c"] for row in rows})
    lines = [
        "| setting | rule | " + " | ".join(f"c {walk:g}" for walk in walks) + " |",
        "|" + "---|" * (2 + len(walks)),
    ]
    for key in dict.fromkeys((row["task"], row["epsilon"], row["steps"], row["rule"]) for row in rows):
        mine = [row for row in rows if (row["task"], row["epsilon"], row["steps"], row["rule"]) == key]
        means = [statistics.mean(row["accuracy"] for row in mine if row["c"] == walk) for walk in walks]
        shown = [f"**{100 * mean:.1f}**" if mean == max(means) else f"{100 * mean:.1f}" for mean in means]
        lines.append(f"| {key[0]}, epsilon {key[1]:g}, {key[2]} steps | {key[3]} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def rules(data: str | None, out: Path, device: str, small: bool) -> list[dict[str, Any]]:
    file = out / "rules.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    for task, epsilon, steps, rate, names in [("digits-mlp", 3.0, 30, 0.05, tuple(RULES))] if small else SETTINGS:
        if any((row["task"], row["epsilon"], row["steps"]) == (task, epsilon, steps) for row in rows):
            continue
        rows += studied(task, epsilon, steps, rate, names, data, (1,) if small else (1, 2), device)
        file.write_text(json.dumps(rows))
        print(table(rows), flush=True)
    return rows


# --- parameters of other kinds ---------------------------------------------------------------------------------------


WORDS = 500


@dataclass(frozen=True)
class But:
    """The constants of `Relative`, but for parameters of some names."""

    names: str
    constant: float

    def __call__(self, model: nn.Module) -> Constants:
        return {
            name: self.constant if fnmatchcase(name, self.names) else found for name, found in Relative()(model).items()
        }


class Bag(nn.Module):
    """The mean of a review's word vectors, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.words(x).mean(1))))


class Adapted(nn.Module):
    """A network that was trained on other classes, in public: frozen, with LoRA of rank 4 and a new head."""

    def __init__(self, base: nn.Sequential) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.ModuleList(nn.Linear(base[i].in_features, 4, bias=False) for i in (0, 2))
        self.b = nn.ModuleList(nn.Linear(4, base[i].out_features, bias=False) for i in (0, 2))
        for each in self.b:
            nn.init.zeros_(each.weight)
        self.head = nn.Linear(base[2].out_features, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, a, b in zip((self.base[0], self.base[2]), self.a, self.b, strict=True):
            x = torch.tanh(layer(x) + b(a(x)))
        return self.head(x)


def normed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 32), nn.LayerNorm(32),
                         nn.Tanh(), nn.Linear(32, 10))  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, 16, 5, stride=2), nn.Tanh(), nn.Conv2d(16, 32, 3), nn.Tanh(),
                         nn.Flatten(), nn.Linear(32 * 9, 10))  # fmt: skip


def _digits_of(pair: Any, low: int, count: int) -> Any:
    x, y = pair
    mine = ((y >= low) & (y < low + 5)).nonzero().flatten()[:count]
    return x[mine], y[mine] - low


def _pretrained(train: Any) -> nn.Sequential:
    """Trained without privacy on classes 0 to 4: what is public in this study."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(100):
        rows = torch.randint(len(train[1]), (128,))
        loss = nn.functional.cross_entropy(model(train[0][rows]), train[1][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def kinds(data: str) -> Iterator[tuple[str, Callable[[], nn.Module], Any, Any, dict[str, Any]]]:
    """Name, model, training and test examples, and the rules to compare."""
    usual = {"plain": None, "relative": Relative()}
    mnist = tasks.load("mnist-mlp", data)
    few = (mnist.train[0][:4000], mnist.train[1][:4000])
    test = (mnist.test[0][:2000], mnist.test[1][:2000])
    base = _pretrained(_digits_of(mnist.train, 0, 4000))
    later = _digits_of(mnist.train, 5, 3000), _digits_of(mnist.test, 5, 2000)
    yield "lora", lambda: Adapted(base), *later, {**usual, "b as a": But("b.*", 0.125)}
    yield "layer norm", lambda: normed(784), few, test, {**usual, "gains 1/8": But("[14].weight", 0.125)}
    square = tuple((x.view(-1, 1, 28, 28), y) for x, y in (few, test))
    yield "convolutions", convolutions, *square, {**usual, "bias own": But("1.bias", 0.25)}
    texts = tasks.load("imdb-lstm", data)
    reviews = tuple((x[:4000] % WORDS, y[:4000]) for x, y in (texts.train, texts.test))
    yield "embedding", Bag, *reviews, {**usual, "bias 1": But("*.bias", 1.0)}


def of_kinds(data: str, out: Path, small: bool, only: Sequence[str]) -> None:
    file = out / "kinds.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    steps, rate = 5 if small else 150, 0.04
    z = accounting.calibrate(partial(planning.questions, make_method("dp-sgd"), rate, steps=steps), 3.0, 1e-5)
    options: dict[str, Any] = {"sample_rate": rate, "noise_multiplier": z, "delta": 1e-5, "steps": steps}
    for name, make, train, test, balances in kinds(data):
        if any(row["task"] == name for row in rows) or (only and name not in only):
            continue
        for rule, balance in balances.items():
            for seed in (1,) if small else (1, 2):
                for walk in (2.0,) if small else (0.6, 1.2, 2.0, 3.0, 4.8):
                    torch.manual_seed(seed)
                    model, method = make(), replace(make_method("dp-sgd"), balance=balance)
                    laid, count = method.layout(model), len(train[1])
                    lr, _ = planning.choose_rate(model, laid, method, count, rate, z, steps, "auto")
                    lr *= walk / WALK
                    list(vestige.train(model, nn.functional.cross_entropy, train, method=method, lr=lr, **options))
                    rows.append({"task": name, "epsilon": 3.0, "steps": steps, "rule": rule, "seed": seed,
                                 "c": walk, "accuracy": vestige.accuracy(model, test)})  # fmt: skip
        file.write_text(json.dumps(rows))
        print(table([row for row in rows if row["task"] == name]), flush=True)


# --- other people's shapes -------------------------------------------------------------------------------------------


LENGTH = 64
"""Words of a review that the small transformer reads."""


class Reader(nn.Module):
    """One layer of attention with LayerNorm over the first words of a review."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.read = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.read(self.words(x) + self.places)).mean(1))


def group_norm_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def shapes(data: str, only: Sequence[str]) -> Iterator[tuple[str, Callable[[], nn.Module], Any, Any]]:
    """Name, model, training and test examples."""
    for name in ("cifar10", "svhn"):
        for kind, make in (("tanh cnn", partial(tanh_cnn_32, 10)), ("group norm cnn", group_norm_cnn)):
            if not only or f"{name} {kind}" in only:
                loaded = tasks.load(f"{name}-cnn", data)
                yield f"{name} {kind}", make, loaded.train, loaded.test
    if not only or "imdb transformer" in only:
        texts = tasks.load("imdb-lstm", data)
        train, test = ((x[:5000, :LENGTH], y[:5000]) for x, y in (texts.train, texts.test))
        words = int(max(train[0].max(), test[0].max())) + 1
        yield "imdb transformer", partial(Reader, words), train, test


def of_models(data: str, out: Path, device: str, small: bool, only: Sequence[str]) -> None:
    steps, rate = 5 if small else 400, 0.04
    budgets, seeds = ((8.0,), (1,)) if small else ((1.0, 8.0), (1, 2))
    for name, make, train, test in shapes(data, only):
        file = out / f"model-{name.replace(' ', '-')}.json"
        rows = json.loads(file.read_text()) if file.exists() else []
        there = {tuple(row[key] for key in ("epsilon", "rule", "seed", "c")) for row in rows}
        train, test = (tuple(part.to(device) for part in pair) for pair in (train, test))
        for epsilon in budgets:
            z = accounting.calibrate(
                partial(planning.questions, make_method("dp-sgd"), rate, steps=steps), epsilon, 1e-5
            )
            for seed, (rule, balance), walk in product(
                seeds, {"plain": None, "relative": Relative()}.items(), (2.0,) if small else (0.6, 1.2, 2.4, 4.8)
            ):
                if (epsilon, rule, seed, walk) in there:
                    continue
                torch.manual_seed(seed)
                model, method = make().to(device), replace(make_method("dp-sgd"), balance=balance)
                laid, count = method.layout(model), len(train[1])
                lr, _ = planning.choose_rate(model, laid, method, count, rate, z, steps, "auto")
                lr *= walk / WALK
                run = vestige.train(
                    model, nn.functional.cross_entropy, train, method=method, lr=lr, sample_rate=rate, steps=steps,
                    noise_multiplier=z, delta=1e-5,
                )  # fmt: skip
                list(run)
                rows.append({"task": name, "epsilon": epsilon, "steps": steps, "rule": rule, "seed": seed, "c": walk,
                             "accuracy": vestige.accuracy(model, test)})  # fmt: skip
                file.write_text(json.dumps(rows))
        print(table(rows), flush=True)


# --- with and without, over whole comparisons ------------------------------------------------------------------------


PART = "balance=relative"


def pairs(folder: Path) -> str:
    """A table of all comparisons in the folder: accuracy without, the change, and Holm's p over all of its rows."""
    cells: dict[tuple[str, float, str, str], dict[int, float]] = {}
    for home in sorted(path.parent for path in folder.glob("*/spec.json")):
        for record in completed(ComparisonFolder(home).records().values()):
            run = record.run
            if run.stage != "tuning":
                key = (run.task, run.budget.value, run.stage, run.label)
                cells.setdefault(key, {})[run.seed] = record.score
    found = []
    for (task, epsilon, rate, label), scores in sorted(cells.items()):
        without = cells.get((task, epsilon, rate, label.replace(PART, "").rstrip(",:")))
        if label.endswith(PART) and without is not None:
            found.append((task, epsilon, rate, label, summarise(list(without.values())), paired(scores, without)))
    corrected = holm([each[5].p for each in found])
    lines = ["| task | rate | epsilon | method | plain | balanced less plain (95%) | p, corrected |", "|---" * 7 + "|"]
    for (task, epsilon, rate, label, plain, gap), p in zip(found, corrected, strict=True):
        mark = "" if p > ALPHA else " ▲" if gap.mean > 0 else " ▼"
        lines.append(
            f"| {task} | {rate} | {epsilon:g} | {label.replace(PART, '').rstrip(',:')} | {100 * plain.mean:.1f} | "
            f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f}){mark} | {p:.2g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "rules", "kinds", "models", "pairs"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/balance"))
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--examples", type=int, default=4096)
    parser.add_argument("--models", nargs="+", default=["mlp", "tanh cnn"])
    parser.add_argument("--only", nargs="+", default=[], help="kinds or models to study, instead of all")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "cost":
        rows = costs(asked.steps, asked.examples, asked.device, asked.models)
        (asked.out / "cost.json").write_text(json.dumps(rows, indent=1))
    elif asked.what == "pairs":
        print(pairs(asked.out))
    elif asked.what == "models":
        of_models(asked.data, asked.out, asked.device, asked.small, asked.only)
    elif asked.what == "kinds":
        of_kinds(asked.data, asked.out, asked.small, asked.only)
    else:
        rules(asked.data, asked.out, asked.device, asked.small)


if __name__ == "__main__":
    main()
