"""What do several processes train through other libraries, in tests? Small runs, each in one function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from process_gang import LOSS, data, flat, network


def finetuned(job: Any, out: Path, *, stop: int | None = None, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """A run of `vestige finetune`, or its first steps."""
    from vestige.finetuning.job import complete, load, start
    from vestige.training.run_folder import RunFolder

    job = load(RunFolder(out)) if resume else replace(job, **changes)
    checkpoint, public, training = start(job, out, resume=resume)
    result = complete(job, checkpoint, public, training, lambda record: record.step != stop)
    return {
        "weights": torch.cat([p.detach().ravel() for p in training.model.parameters() if p.requires_grad]),
        "asked": sum(training.ledger.spent.values()),
        "epsilon": training.guarantee().epsilon_if_noise_were_secret,
        "quality": result.perplexity if result.accuracy is None else result.accuracy,
        "stopped": result.stopped,
    }


def accelerated(
    order: str = "prepare, make_private",
    *,
    several: bool = True,
    physical: int | None = None,
    buffer: bool = False,
    loading: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A loop of two epochs under Accelerate, with `prepare` before or after `make_private`."""
    import accelerate

    with environment(several):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        configuration = accelerate.DataLoaderConfiguration(**(loading or {}))
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration, **options)
        assert accelerator.num_processes == (2 if several else 1)
        model = network()
        if buffer:
            model.register_buffer("constant", torch.ones(2))
        parts: Any = (
            model,
            torch.optim.Adam(model.parameters(), lr=0.05),
            DataLoader(TensorDataset(*data()), batch_size=12, shuffle=True),
        )
        engine = vestige.PrivacyEngine(reproducible=5)

        def make_private(module: Any, optimizer: Any, loader: Any) -> Any:
            return engine.make_private(
                module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                method="fo-dp-sgd", max_physical_batch_size=physical,
            )  # fmt: skip

        ways = [accelerator.prepare, make_private]
        for way in ways if order == "prepare, make_private" else reversed(ways):
            parts = way(*parts)
        model, optimizer, loader = parts
        assert isinstance(model, nn.parallel.DistributedDataParallel) == several
        read = []
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(LOSS(model(x), y))
                    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0
                    optimizer.step()
                    optimizer.zero_grad()
                read.append(x)
        return {
            "weights": flat(model),
            "asked": engine._ledger.spent.total(),
            "epsilon": engine.guarantee(1e-3).epsilon_if_noise_were_secret,
            "steps": engine._steps.step_number,
            "rows": torch.cat(read),
        }


@contextmanager
def environment(several: bool) -> Iterator[None]:
    """As torchrun sets it for a process of its own."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    if several:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        values = (rank, rank, size, size, "127.0.0.1", 29511)
        os.environ.update(dict(zip(names, map(str, values), strict=True)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
