"""What does spectral memory cost? A step of SMA-DP-SGD over our own group-wise DP-SGD, side by side in one run.

usage: python bench/sma.py [--device cpu|cuda] [--models mlp cnn resnet18] [--engine NAME] [--batch N] [--epochs N]
                           [--physical-batch N] [--lags N ...] [--solver threads|stream] [--threads N] [--json FILE]

The images are random: the cost does not depend on what they show. The methods train in turn, an epoch (25 steps) each;
a ratio is of two such epochs on the same samples, the spectra begun in one included. Lag 0 waits for each spectrum;
with `--solver stream` a thread and a stream of the GPU find those of later lags, instead of the CPU's threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import vestige
from vestige.engines.registry import ENGINES
from vestige.layout import Layout
from vestige.mechanism.groups import Layers
from vestige.optim.spectral import memory_by_tail_exponent as spectral
from vestige.optim.spectral import tail_exponent
from vestige.optim.spectral.memory_by_tail_exponent import group_exponents
from vestige.tasks import models

RATE = 0.04
EPOCH = round(1 / RATE)
NEVER = 1_000_000
GOALS = {"every step": 1.25, "once an epoch": 1.05}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), models.mlp(3 * 32 * 32, 10)),
    "cnn": lambda: models.cnn(3, 32, 10),
    "resnet18": lambda: models.resnet18(10),
}


def run(
    name: str, method: vestige.Method, device: str, engine: str, batch: int, physical: int | None
) -> vestige.Training:
    torch.manual_seed(0)
    examples = round(batch / RATE)
    data = torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,))
    return vestige.train(
        MODELS[name]().to(device),
        nn.functional.cross_entropy,
        data,
        method=method,
        noise_multiplier=1.0,
        delta=1e-6,
        sample_rate=RATE,
        steps=NEVER,
        lr=1e-3,
        engine=engine,
        max_physical_batch_size=physical,
        reproducible=0,  # every method meets the same samples, so that their sizes do not differ
    )


class OnStream:
    """`spectrum.Background`, found by the GPU on a stream of its own, whose calls come from one thread."""

    threads = ThreadPoolExecutor(1)

    def __init__(self, weights: Sequence[Tensor], convention: tail_exponent.Convention) -> None:
        begun = torch.cuda.Event()
        begun.record()
        self._future = self.threads.submit(self._find, weights, convention, begun)

    def _find(self, weights: Sequence[Tensor], convention: tail_exponent.Convention, begun: torch.cuda.Event) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            return tail_exponent.exponents(weights, convention).cpu()

    def go_on(self) -> None:
        pass

    def result(self) -> Tensor:
        return self._future.result()


def on_stream() -> ExitStack:
    """Inside, spectra that are awaited are found on a stream."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(tail_exponent, "Background", OnStream))
    recorded = partial(torch.cuda.graph, capture_error_mode="thread_local")  # another thread calls CUDA meanwhile
    stack.enter_context(mock.patch.object(torch.cuda, "graph", recorded))
    return stack


def in_turn(epochs: int, wait: Callable[[], None], **records: Iterator[Any]) -> dict[str, list[float]]:
    """Seconds of each method's epochs, taken in turn so that the machine's moods fall on all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in records}
    names = list(records)
    for index in range(epochs + 1):
        # On a GPU whoever meets a new batch size first pays for it, so everyone goes first in turn.
        first = index % len(names)
        for name in names[first:] + names[:first]:
            wait()
            begin = time.perf_counter()
            for _ in islice(records[name], EPOCH):
                pass
            for begun in list(spectral._begun.values()):
                for found in begun.values():
                    found.result()
            wait()
            if index:  # the first is a rehearsal
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def timed(call: Callable[[], object], wait: Callable[[], None], repeats: int = 10) -> float:
    found = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    methods = {"dp-sgd": vestige.by_group(vestige.dp_sgd(), Layers())}
    for lag in arguments.lags:
        methods[f"every step, lag {lag}"] = vestige.sma_dp_sgd(refresh_spectrum=1, spectrum_lag=lag)
        methods[f"once an epoch, lag {lag}"] = vestige.sma_dp_sgd(refresh_spectrum=EPOCH, spectrum_lag=lag)
    trainings = {
        label: run(name, method, device, arguments.engine, arguments.batch, arguments.physical_batch)
        for label, method in methods.items()
    }
    seconds = in_turn(arguments.epochs, wait, **{label: iter(training) for label, training in trainings.items()})
    layout = Layout.of(trainings["dp-sgd"].model, Layers())
    weights = {n: p.detach() for n, p in trainings["dp-sgd"].model.named_parameters()}
    matrices = [weight for weight in weights.values() if weight.dim() > 1]
    owners = [segment.group for segment in layout.segments]
    ratios = {
        label: statistics.median(mine / plain for mine, plain in zip(spent, seconds["dp-sgd"], strict=True))
        for label, spent in seconds.items()
    }
    return {
        "model": name,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "engine": arguments.engine,
        "solver": arguments.solver,
        "expected_batch": arguments.batch,
        "parameters": layout.size,
        "groups": layout.groups,
        "dp_sgd_step_ms": 1e3 * statistics.median(seconds["dp-sgd"]) / EPOCH,
        "spectrum_ms": 1e3 * timed(lambda: group_exponents(weights, owners, "flatten"), wait),
        "background_ms": 1e3 * timed(lambda: tail_exponent.Background(matrices, "flatten").result(), wait),
        "ratios": {label: ratio for label, ratio in ratios.items() if label != "dp-sgd"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--engine", default="bookkeeping", choices=list(ENGINES))
    parser.add_argument("--batch", type=int, default=200, help="expected batch")
    parser.add_argument("--physical-batch", type=int)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4], help="steps after which a spectrum is used")
    parser.add_argument(
        "--solver", choices=["threads", "stream"], default="threads", help="where lags above 0 are found"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with on_stream() if arguments.solver == "stream" else ExitStack():
        rows = [measure(name, arguments) for name in arguments.models]
    print(f"goals: every step {GOALS['every step']}, once an epoch {GOALS['once an epoch']}; the paper reports 2.94\n")
    labels = list(rows[0]["ratios"])
    print("| model | device | engine | batch | parameters | groups | group-wise DP-SGD step | spectrum, waiting "
          f"| spectrum, in the background | {' | '.join(labels)} |")  # fmt: skip
    print("|---" * (9 + len(labels)) + "|")
    for row in rows:
        print(
            f"| {row['model']} | {row['device']} | {row['engine']} | {row['expected_batch']} | {row['parameters']:,} "
            f"| {row['groups']} | {row['dp_sgd_step_ms']:.1f} ms | {row['spectrum_ms']:.1f} ms "
            f"| {row['background_ms']:.1f} ms | {' | '.join(f'{ratio:.3f}' for ratio in row['ratios'].values())} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"goals": GOALS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
