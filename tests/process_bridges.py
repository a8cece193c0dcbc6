"""What do several processes train through other libraries, in tests? Small runs, each in one function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch


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
