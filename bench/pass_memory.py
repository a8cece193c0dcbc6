"""How much memory does a private step take beside a plain one? The peak of live tensors on a CPU, without a GPU.

usage: python bench/pass_memory.py [--models NAME ...] [--rows N] [--ways loop graphs train train-graphs] [--small]
       [--largest N]

Each model of `bench/defaults.py` runs one step on the same number of rows: plainly, in a private loop and by
`vestige.train`, each as it is and as it is captured on a GPU (`graphs`: what stands in for a CUDA graph runs
its work once, and nothing is collected meanwhile, as in a capture). Peaks are those of the first two steps and
of what it takes to begin, beside the weights; there is no optimizer state. `--largest` lists by what the memory at the
peak was allocated.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Subset

import vestige
from defaults import MODELS, SCORES, Model, Rows, Scored, collate, loss_of, one_length
from vestige.engines import cuda_graphs
from vestige.engines.per_example import kernels
from vestige.privacy_engine import captured_passes
from vestige.randomness import lattice

WAYS = ("plain", "loop", "graphs", "train", "train-graphs")


class Still:
    """Stands for a CUDA graph: capturing runs the work without collecting garbage, a replay does nothing."""

    def __init__(self, work: Callable[[], object], pool: Any, device: torch.device) -> None:
        gc.disable()
        try:
            work()
        finally:
            gc.enable()

    def replay(self) -> None:
        return None


@contextmanager
def captured_here(captures: bool) -> Iterator[None]:
    """Inside, passes are captured as on a GPU, if they are to be; noise is not drawn, which takes memory on a CPU
    alone."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(lattice, "add_steps", new=undrawn))
        stack.enter_context(mock.patch.object(kernels, "blanked", blanked_in_place))
        for place in (captured_passes, cuda_graphs):
            stack.enter_context(mock.patch.object(place, "captured", Still))
            stack.enter_context(mock.patch.object(place, "capturable", return_value=captures))
        yield


def undrawn(*given: object, **options: object) -> None:
    """A mock would keep what it is given."""


def blanked_in_place(tensor: Tensor, rows: Tensor, in_place: bool = False) -> Tensor:
    """As a GPU does it; on a CPU, what is blanked is a copy."""
    if not in_place or kernels._pieces(tensor) is None:
        return tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)
    return tensor.masked_fill_(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)


def peak_of(work: Callable[[], object], largest: int = 0) -> tuple[int, Counter[str]]:
    """The most bytes of tensors that were alive at a time, beyond those before, and what the most of them was for."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [(event.start_time_ns, event) for event in _allocations(seen)]
    now, most, alive, best = 0, 0, dict[int, tuple[int, Any]](), dict[int, tuple[int, Any]]()
    for _, event in sorted(events, key=lambda each: each[0]):
        size, place = event.extra_fields.alloc_size, event.extra_fields.ptr
        now += size
        if size > 0:
            alive[place] = size, event
        else:
            alive.pop(place, None)
        if now > most:
            most = now
            if largest:
                best = dict(alive)
    by = Counter[str]()
    for size, event in best.values():
        by[_made_by(event)] += size
    return most, by


def _allocations(seen: Any) -> Iterator[Any]:
    waiting = list(seen.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if type(event.extra_fields).__name__ == "_ExtraFields_Allocation":
            yield event


def _made_by(event: Any) -> str:
    names = []
    while (event := event.parent) is not None:
        if event.name != "PythonDispatchMode" and not event.name.startswith("autograd::engine"):
            names.append(event.name)
    return " in ".join(dict.fromkeys(names[:4]))


def step_of(model: Model, rows: int, small: bool, way: str) -> Iterator[None]:
    """Steps of a way to train, one for each item after the first, which is the model alone."""
    torch.manual_seed(0)
    module = model.build(small).train()
    data = Subset((Scored if way == "train" else Rows)(model, small), range(rows))
    yield
    if way == "train":
        own = type(module).__module__.split(".")[0] not in ("transformers", "peft")
        yield from vestige.train(
            module, SCORES[model.scored], data, method="dp-sgd", batch_size=rows, steps=2, delta=1e-5, lr=1e-4,
            noise_multiplier=1.0, max_grad_norm=1.0, collate_fn=one_length if own else None, target="labels",
        )  # fmt: skip
        return
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    loader: Any = DataLoader(data, batch_size=rows, collate_fn=collate)
    if way == "loop":
        module, optimizer, loader = vestige.PrivacyEngine().make_private(
            module=module, optimizer=optimizer, noise_multiplier=1.0, max_grad_norm=1.0, data_loader=loader
        )
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, module, batch).backward()
            optimizer.step()
            yield


def measured(name: str, rows: int, small: bool, way: str, largest: int) -> tuple[int, Counter[str]]:
    """Of two steps: in the first, passes are captured; what it leaves is there in the second."""
    with captured_here(way.endswith("graphs")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = {"graphs": "loop", "train-graphs": "train"}.get(way, way)
        steps = step_of(MODELS[name], rows, small, kind)
        next(steps)
        return peak_of(lambda: (next(steps), next(steps)), largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["Swin-T", "BERT-base", "T5-small", "U-Net"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--ways", nargs="*", default=WAYS[1:], choices=WAYS[1:])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--largest", type=int, default=0)
    given = parser.parse_args()
    unknown = set(given.models) - set(MODELS)
    if unknown or given.rows < 2:
        parser.error(f"models are {', '.join(MODELS)}; rows from 2 up")
    print("| model | rows | step | peak MiB | over plain |\n|---|---|---|---|---|")
    for name in given.models:
        plain = 0
        for way in ("plain", *given.ways):
            peak, by = measured(name, given.rows, given.small, way, given.largest)
            plain = plain or peak
            print(f"| {name} | {given.rows} | {way} | {peak / 2**20:.1f} | {peak / plain:.2f}x |", flush=True)
            for what, size in by.most_common(given.largest):
                print(f"    {size / 2**20:8.1f} MiB {what}")


if __name__ == "__main__":
    main()
