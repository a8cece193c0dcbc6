"""What does a private step cost over a plain one? Every engine on the same models, in one process, in one table.

usage: python bench/engines.py [--device cpu|cuda] [--quick] [--models NAME ...] [--rows NAME ...] [--precision NAME]
       [--others [NAME ...]] [--loops NAME ...] [--optimizer NAME] [--steps N] [--times X] [--turns N] [--host]
       [--kernels] [--threads N] [--cpu-time] [--json FILE]

A step is forward, backward, clipping, noise and the update. Peak memory is what the process takes of the GPU meanwhile,
recordings included; on the CPU there is no such count, so only time is given. With --others, models of other people's
packages, or of our own that are named, in loops of Poisson batches from the first step on (`loops`).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, repeat
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import host
import loops
import vestige
from loops import LOOPS, MODELS, OPTIMIZERS
from others import OTHERS
from own import CASES, Case
from vestige import PrivacyEngine
from vestige.engines.cuda_graphs import Captured
from vestige.engines.per_example import kernels
from vestige.engines.per_example.gradient_forms import Geometry, Patches
from vestige.engines.reference import Reference
from vestige.layout import Layout, Segment
from vestige.mechanism.clipping import Flat, GradientEngine, Transform
from vestige.optim.memory import HISTORIES, Blend, Identity
from vestige.randomness.gaussian import add_noise
from vestige.randomness.keys import Randomness
from vestige.randomness.sum_and_release_types import BoundedSum, Release

Step = Callable[[], object]
BOUND, MULTIPLIER, RATE = 1.0, 1.0, 0.1


def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def opacus_hooks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    watched = GradSampleModule(model)
    inner = torch.optim.SGD(watched.parameters(), lr=1e-3)
    options = {"noise_multiplier": MULTIPLIER, "max_grad_norm": BOUND, "expected_batch_size": len(batch[1])}
    optimizer = DPOptimizer(inner, **options)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(watched(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    watched = GradSampleModuleFastGradientClipping(model, max_grad_norm=BOUND, use_ghost_clipping=True)
    inner = torch.optim.SGD(watched.parameters(), lr=1e-3)
    options = {"noise_multiplier": MULTIPLIER, "max_grad_norm": BOUND, "expected_batch_size": len(batch[1])}
    optimizer = DPOptimizerFastGradientClipping(inner, **options)
    criterion = DPLossFastGradientClipping(watched, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        criterion(watched(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def private(
    make: Callable[..., GradientEngine], memory: bool = False, transform: Transform | None = None
) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Step]:
    """Clip and sum, add noise, remember, move: the parts of `training.advance`, on a given batch."""

    def build(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
        layout, device = Layout.of(model), batch[0].device
        parameters = layout.parameters(model)
        engine, clip, gradient = (
            make(model, F.cross_entropy, layout),
            Flat(BOUND),
            torch.zeros(layout.size, device=device),
        )
        remember = Blend(window=8) if memory else Identity()
        state = remember.init(layout, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for name, view in layout.views(gradient).items():
            parameters[name].grad = view
        expected, randomness, steps = float(len(batch[1])), Randomness.secret(), count()

        def step() -> None:
            total = torch.zeros(layout.size, device=device)
            engine(batch, parameters, clip, total, transform)
            std, _ = add_noise(BoundedSum(total, BOUND), MULTIPLIER, randomness.stream("noise", next(steps)))
            direction = remember.step(Release(total, std, expected, RATE), state, parameters).direction
            torch.mul(direction, 1 / expected, out=gradient)
            optimizer.step()

        return step

    return build


def whole_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """What `vestige.train` does: sampling, the step, the ledger and the record."""
    options: dict[str, Any] = {"method": "dp-sgd", "noise_multiplier": MULTIPLIER, "delta": 1e-5, "lr": 1e-3}
    records = iter(vestige.train(model, F.cross_entropy, batch, sample_rate=1.0, steps=10**6, **options))
    return lambda: next(records)


class Whole(Dataset[Any]):
    """Rows that are fetched together: what a loader itself costs is not the question here."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch[1])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.batch[0][[row]], self.batch[1][[row]]

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        return self.batch if len(rows) == len(self) else (self.batch[0][rows], self.batch[1][rows])


def as_fetched(rows: Any) -> Any:
    return rows


def privacy_engine(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """A user's own loop, with the ledger and the accountant's rows that it keeps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Whole(batch), batch_size=len(batch[1]), collate_fn=as_fetched)
    _, _, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=MULTIPLIER, max_grad_norm=BOUND
    )
    loader.batch_sampler.steps = 64  # draws of a pass over it: what it costs to begin one is not a step's
    batches = chain.from_iterable(repeat(loader))

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


ROWS: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Step]] = {
    "plain SGD": plain,
    "Opacus hooks": opacus_hooks,
    "Opacus ghost": opacus_ghost,
    "vmap": private(Reference),
    "ours, DP-SGD": private(Captured),
    "ours, FO-DP-SGD K=8": private(Captured, memory=True),
    "ours, PrivacyEngine": privacy_engine,
    "ours, vestige.train": whole_step,
}


def measure(
    step: Step, device: str, seconds: float, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float | None]:
    """The best of some rounds, each the mean of enough steps to be timed, and the peak memory of a step."""
    step(), step()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of what was tried out
        torch.cuda.reset_peak_memory_stats()
    start = clock()
    step()
    if cuda:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved() / 2**20 if cuda else None
    count = max(1, min(200, int(seconds / rounds / (clock() - start + 1e-9))))
    means = []
    for _ in range(rounds):
        start = clock()
        for _ in range(count):
            step()
        if cuda:
            torch.cuda.synchronize()
        means.append((clock() - start) / count)
    return min(means) * 1e3, peak


def compare(name: str, case: Case, device: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    size = case.batch if device == "cuda" else case.cpu_batch
    assert size is not None
    size = max(1, size // 4) if options.quick else size
    base: dict[str, Any] = {}
    for row in options.rows:
        torch.manual_seed(0)
        result: dict[str, Any] = {"model": name, "batch": size, "row": row}
        try:
            model = case.build().to(device)
            batch = (case.inputs(size).to(device), torch.randint(10, (size,), device=device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = ROWS[row](model, batch)
                result["ms"], result["MiB"] = measure(step, device, options.seconds, options.rounds, options.clock)
        except ImportError:
            result["failed"] = "not installed"
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            result["failed"] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}"
        model = batch = step = None  # type: ignore[assignment]
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        base = base or result
        if "failed" not in result and "failed" not in base:
            result["time"] = result["ms"] / base["ms"]
            result["memory"] = result["MiB"] / base["MiB"] if result["MiB"] else None
        yield result


def line(result: dict[str, Any]) -> str:
    head = f"| {result['model']} [{result['batch']}] | {result['row']} |"
    if "failed" in result:
        return f"{head} {result['failed']} | | | |"
    memory = "" if result["MiB"] is None else f"{result['MiB']:.0f}"
    ratio = "" if result["memory"] is None else f"{result['memory']:.2f}x"
    return f"{head} {result['ms']:.2f} | {result['time']:.2f}x | {memory} | {ratio} |"


def kernel_rows() -> Iterator[dict[str, Any]]:
    """Fused kernels beside what they replace, and beside the copy speed of this GPU."""
    one, other = torch.empty(2**28, device="cuda"), torch.empty(2**28, device="cuda")
    bandwidth = 2 * one.numel() * 4 / timed(lambda: other.copy_(one)) / 1e6
    yield {"kernel": "copy", "GB/s": bandwidth}
    yield from noise_rows(11_200_000, bandwidth)
    for window in (8, 32):
        for history in HISTORIES:
            yield from memory_rows(window, 11_200_000, history, bandwidth)
    for sequences in ((512, 64, 384, 1536), (512, 64, 1152, 384), (32, 256, 768, 3072), (32, 256, 2304, 768)):
        yield from norm_rows(*sequences)
    for layer in ((2048, 3, 32, 32), (2048, 32, 32, 32), (2048, 64, 64, 16), (2048, 128, 128, 8)):
        yield from convolution_rows(*layer)
    for layer in ((512, 64, 64, 32), (512, 128, 128, 16), (512, 256, 256, 8), (512, 512, 512, 4)):
        yield from convolution_rows(*layer)


def timed(step: Step) -> float:
    return measure(step, "cuda", 0.2, 3)[0]


def on_device(step: Step, repeats: int = 50) -> float:
    """Milliseconds of a step as the GPU sees it: the queue is full before it begins, so the host is never awaited."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        torch.cuda._sleep(200_000_000)
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / repeats)
    return best


def plainly(on: bool) -> mock._patch[Any]:
    """Inside, memory and noise run without the fused kernels, where `on`."""
    return mock.patch.multiple("vestige.optim.window", triton_available=lambda: not on)


def memory_rows(window: int, size: int, history: Any, bandwidth: float) -> Iterator[dict[str, Any]]:
    """The whole step of the fractional memory over its bytes: rows, release and trend in; row and trend out."""
    memory = Blend(window=window, history=history)
    release = Release(torch.randn(size, device="cuda"), 1.0, 1.0)
    apart = 4 if history == "bfloat16" else 0
    least = size * (window * HISTORIES[history].itemsize + 12 + apart) / bandwidth / 1e6
    for way in ("fused", "plain"):
        state = memory.init(Layout((Segment("w", 0, (size,)),)), torch.device("cuda"))
        step = partial(memory.step, release, state, {})
        with plainly(way == "plain"):
            for _ in range(window + 1):
                step()
            spent, host = on_device(step), timed(step)
        yield {
            "kernel": f"memory step K={window} x {size} {history}",
            "way": way,
            "ms": spent,
            "over its bytes": spent / least,
            "with the host": host,
        }


def noise_rows(size: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    total, stream = torch.zeros(size, device="cuda"), Randomness.secret().stream("noise", 0)
    generator = torch.Generator("cuda").manual_seed(1)
    ways: dict[str, Step] = {
        "fused": lambda: add_noise(BoundedSum(total, BOUND), MULTIPLIER, stream),
        "plain": lambda: total.add_(torch.randn(size, generator=generator, device="cuda").mul_(BOUND * MULTIPLIER)),
    }
    for way, function in ways.items():
        spent = on_device(function)
        yield {
            "kernel": f"noise {size}",
            "way": way,
            "ms": spent,
            "over its bytes": spent * bandwidth * 1e6 / (8 * size),
        }


def norm_rows(examples: int, positions: int, out: int, width: int) -> Iterator[dict[str, Any]]:
    left = torch.randn(examples, positions, out, device="cuda")
    right = torch.randn(examples, positions, width, device="cuda")
    ways: dict[str, Step] = {
        "fused": lambda: kernels.outer_norms(left, right, 2.0**-23),
        "plain": lambda: kernels.bounded(*kernels.outer_squares(left, right), 2.0**-23),
        "the weight's own gradient": lambda: left.flatten(0, 1).t() @ right.flatten(0, 1),
    }
    for way, function in ways.items():
        yield {"kernel": f"norms {out}x{width}, {examples} x {positions}", "way": way, "ms": timed(function)}


def plain_gradients(patches: Patches) -> Tensor:
    """What `Patches.dense` does where there is no fused kernel."""
    out = patches.image.new_empty(len(patches.image), *patches.shape)
    parts = patches._parts(prod(patches.shape[1:]) * patches.signal.shape[2:].numel())
    for part, place in zip(parts, out.split([len(part.image) for part in parts]), strict=True):
        part._materialise(place)
    return out


def convolution_rows(examples: int, channels: int, outputs: int, size: int) -> Iterator[dict[str, Any]]:
    image = torch.randn(examples, channels, size, size, device="cuda")
    signal = torch.randn(examples, outputs, size, size, device="cuda")
    shape = ((3, 3), (1, 1), (1, 1), (1, 1), 1)
    patches = Patches(image, signal, Geometry(*shape))
    into, factors = torch.zeros(outputs, channels, 3, 3, device="cuda"), torch.ones(examples, device="cuda")
    ways: dict[str, Step] = {
        "fused, norms only": lambda: kernels.convolution_gradients(image, signal, shape, False),
        "fused, kept": lambda: kernels.convolution_gradients(image, signal, shape, True),
        "plain": lambda: plain_gradients(patches),
        "weighted sum": lambda: patches.add(into, factors),
    }
    if size <= 16:
        ways["ghost"] = patches._ghost_squares
    chosen = "ghost" if patches._ghost_cost() < patches._direct_cost() else "direct"
    for way, function in ways.items():
        label = f"convolution {channels}->{outputs}, {examples} x {size}x{size}"
        yield {"kernel": label, "way": way, "ms": timed(function), "the rule takes": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a quarter of the batch, fewer repetitions")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument(
        "--precision",
        choices=["tf32", "torch"],
        default="tf32",
        help="tf32: matrix products and convolutions in TF32; torch: as torch is set by itself, convolutions only",
    )
    parser.add_argument("--others", nargs="*", choices=list(MODELS), help="other people's models; none named: all")
    parser.add_argument("--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS), help="with --others")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="with --others")
    parser.add_argument("--steps", type=int, default=200, help="with --others: how many, from the first on")
    parser.add_argument("--times", type=float, default=1, help="with --others: so many times each model's batch")
    parser.add_argument(
        "--turns", type=int, help="with --others: medians of so many rounds, the loops in turn, instead"
    )
    parser.add_argument("--host", action="store_true", help="what a step costs the host alone, on a CPU (`host`)")
    parser.add_argument("--kernels", action="store_true", help="also the fused kernels one by one (GPU)")
    parser.add_argument("--threads", type=int, help="threads of the CPU")
    parser.add_argument("--cpu-time", action="store_true", help="the process's time, not the clock's: a busy machine")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    for name in ("steps", "times", "turns", "threads"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"argument --{name}: {value} is not above zero")
    options.clock = time.process_time if options.cpu_time else time.perf_counter
    options.seconds, options.rounds = (0.5, 2) if options.quick else (3.0, 5)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {machine}, precision {options.precision} on a GPU; over plain training\n")
    if options.host:
        results = host.table({row: ROWS[row] for row in ("plain SGD", "ours, PrivacyEngine", "ours, vestige.train")})
        if options.json:
            options.json.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "host": results}))
        return
    if options.others is not None:
        names, share = options.others or list(OTHERS), (4 if options.quick else 1) / options.times
        measured, count = (loops.in_turn, options.turns) if options.turns else (loops.table, options.steps)
        found = list(measured(names, options.loops, options.device, count, share, options.optimizer))
        if options.json:
            options.json.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "loops": found}))
        return
    print("| model [batch] | step | ms | time | peak MiB | memory |\n|---|---|---|---|---|---|")
    results = []
    for name in options.models:
        if options.device == "cuda" or CASES[name].cpu_batch is not None:
            for result in compare(name, CASES[name], options.device, options):
                print(line(result), flush=True)
                results.append(result)
    kernel_results: list[dict[str, Any]] = []
    if options.kernels and options.device == "cuda":
        print()
        for result in kernel_rows():
            print(", ".join(f"{k}: {v:.4g}" if isinstance(v, float) else str(v) for k, v in result.items()), flush=True)
            kernel_results.append(result)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "torch": torch.__version__, "steps": results, "kernels": kernel_results})
        )


if __name__ == "__main__":
    main()
