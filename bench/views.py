"""What do sixteen views of every example cost? De et al.'s private step over a plain one on as many views.

usage: python bench/views.py [--device cpu|cuda] [--examples N] [--copies K] [--depth D] [--width W] [--size S]
       [--precision tf32|torch] [--bfloat16] [--channels-last] [--rows NAME ...] [--seconds T] [--json FILE]

Both steps draw the views, flipped and cropped, from the same examples; the private one averages each example's
gradients before it clips. The model is their WideResNet, with GroupNorm and standardised weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines import Step, line, measure, private
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.cuda_graphs import Captured
from vestige.engines.reference import Reference
from vestige.mechanism.augmentation import Augment
from vestige.tasks import models

Build = Callable[[nn.Module, tuple[Tensor, Tensor]], Step]


def plain(augment: Augment) -> Build:
    def build(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            images, labels = augment.terms({}, batch)[0].batch
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    return build


def rows(augment: Augment) -> dict[str, Build]:
    return {
        "plain SGD on the views": plain(augment),
        "ours": private(Captured, transform=augment),
        "ours, unrecorded": private(BookKeeping, transform=augment),
        "ours, one view": private(Captured),
        "vmap": private(Reference, transform=augment),
    }


def measured(row: str, build: Build, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = models.wide_resnet(10, options.depth, options.width)
    models.lay_out(model, options.device, beside=options.channels_last)
    images = torch.randn(options.examples, 3, options.size, options.size, device=options.device)
    batch = images, torch.randint(10, (options.examples,), device=options.device)
    name = f"WRN-{options.depth}-{options.width}, {options.copies} views"
    result: dict[str, Any] = {"model": name, "batch": options.examples, "row": row}
    try:
        with warnings.catch_warnings(), torch.autocast(options.device, torch.bfloat16, enabled=options.bfloat16):
            warnings.simplefilter("ignore")
            result["ms"], result["MiB"] = measure(build(model, batch), options.device, options.seconds, 3)
    except RuntimeError as problem:
        result["failed"] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--precision", choices=["tf32", "torch"], default="tf32")
    parser.add_argument("--bfloat16", action="store_true", help="forward and backward under autocast")
    parser.add_argument("--channels-last", action="store_true", help="channels side by side in memory")
    parser.add_argument("--rows", nargs="+", choices=list(rows(Augment())), default=list(rows(Augment()))[:4])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if options.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {machine}, precision {options.precision} on a GPU\n")
    print("| model [examples] | step | ms | time | peak MiB | memory |\n|---|---|---|---|---|---|")
    results: list[dict[str, Any]] = []
    builds = rows(Augment(options.copies))
    for row in options.rows:
        result = measured(row, builds[row], options)
        base = results[0] if results else result
        if "failed" not in result and "failed" not in base:
            result["time"] = result["ms"] / base["ms"]
            result["memory"] = result["MiB"] / base["MiB"] if result["MiB"] else None
        results.append(result)
        print(line(result), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "steps": results}))


if __name__ == "__main__":
    main()
