"""What is wrong with this model or loader, before training? Each finding names the part at fault and a fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from vestige.checks import check_rate
from vestige.engines.independence import broken, mixing
from vestige.engines.registry import ENGINES
from vestige.layout import Layout, call_with
from vestige.mechanism.bad_rows import made_up_pass
from vestige.mechanism.clipping import Loss
from vestige.mechanism.examples import Examples
from vestige.methods.base import Method
from vestige.training.physical_batch import made_up, part_of_a_run

PROBED = 8
"""How many examples the gradient checks look at."""


@dataclass(frozen=True)
class Finding:
    """`error`: no guarantee is possible. `warning`: allowed, but probably not meant."""

    level: Literal["error", "warning"]
    where: str
    what: str


def examine(model: nn.Module, loss: Loss, data: object) -> list[Finding]:
    """Everything that would make private training of `model` on `data` wrong or useless; empty when all is well.

    `data` is a tuple of tensors, a map-style dataset or a DataLoader. The findings are for the data's owner only: they
    are computed from data without noise.
    """
    findings = [Finding("error", where, what) for where, what in [*mixing(model), *broken(model)]]
    if any(map(is_lazy, model.parameters())):
        return _each_cause_once(findings)
    findings += _trainable(model) + _inplace(model) + _tied(model)
    if isinstance(data, DataLoader):
        findings += _loader(data)
        data = data.dataset
    faults = _rows_at_fault(model, loss, data)
    findings += faults
    if not faults or isinstance(data, tuple | TensorDataset):
        batch, count = _some(data)
    else:
        return _each_cause_once(findings)  # what follows is about batches of all rows
    findings += _inputs(data, batch)
    if not any(finding.level == "error" for finding in findings):
        findings += _gradients(model, loss, batch)
    if count < 2 * PROBED:
        findings.append(
            Finding("warning", "data", f"only {count} examples: noise will drown them at any useful epsilon")
        )
    return _each_cause_once(findings)


LISTED = 5


def _rows_at_fault(model: nn.Module, loss: Loss, data: object) -> list[Finding]:
    """Rows that cannot be read, or whose label the loss cannot take: a private run leaves them out silently."""
    try:
        examples = Examples(data, torch.device("cpu"))
        here = {name: p.device for name, p in model.named_parameters()}
        row = made_up(examples.blank(), 1, next(iter(here.values()), torch.device("cpu")))
        admissible = made_up_pass(model, loss, examples.form, row)
    except (ValueError, OSError, TypeError):
        return []  # the training says it too, before it begins
    reasons: dict[str, list[int]] = {}
    for place in range(examples.population):
        try:
            batch = examples.fetch(torch.tensor([place]))[0]
            if admissible is not None and not bool(admissible(batch[-1].cpu()).all()):
                reasons.setdefault("the loss takes no such label", []).append(place)
        except Exception as error:  # whatever a user's dataset raises
            reasons.setdefault(" ".join(f"{type(error).__name__}: {error}".split()), []).append(place)
    return [
        Finding(
            "warning",
            f"{len(places)} rows ({', '.join(map(str, places[:LISTED]))}{', ...' if len(places) > LISTED else ''})",
            f"contribute nothing to a private run: {reason}",
        )
        for reason, places in reasons.items()
    ]


def _each_cause_once(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for all places that have the same one."""
    places: dict[tuple[Literal["error", "warning"], str], list[str]] = {}
    for finding in findings:
        places.setdefault((finding.level, finding.what), []).append(finding.where)
    return [Finding(level, _listed(where), what) for (level, what), where in places.items()]


def _listed(places: Sequence[str]) -> str:
    few = places if len(places) <= 3 else places[:2]
    return ", ".join(few) + (f" and {len(places) - 2} others like these" if few is not places else "")


def first_examples(data: object, count: int) -> list[Tensor]:
    """The first examples of a tuple of tensors, a dataset or a loader, as one batch."""
    return _some(data.dataset if isinstance(data, DataLoader) else data, count)[0]


def largest_batch(model: nn.Module, loss: Loss, data: object, rate: float) -> int:
    """How many examples the fast engine can take at once here, up to a sample at this rate (`physical_batch`)."""
    check_rate(rate)
    batch, count = _some(data.dataset if isinstance(data, DataLoader) else data, 1)
    blank = [part[:0] for part in batch]
    return part_of_a_run(
        model, ENGINES["bookkeeping"], loss, Layout.of(model), Method(name="dp-sgd"), blank, count, rate, steps=1
    )


def _trainable(model: nn.Module) -> list[Finding]:
    found = []
    named = list(model.named_parameters())
    if not any(p.requires_grad for _, p in named):
        found.append(Finding("error", "model", "no parameter is trainable: call requires_grad_(True) on some"))
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype != torch.float32:
            what = f"is {parameter.dtype}: releases are float32, call model.float() and use autocast for speed"
            found.append(Finding("error", f"parameter {name!r}", what))
    return found


def _inplace(model: nn.Module) -> list[Finding]:
    return [
        Finding(
            "warning",
            f"layer {name!r} ({type(module).__name__})",
            "works in place, which per-example engines may refuse: build it with inplace=False",
        )
        for name, module in model.named_modules()
        if getattr(module, "inplace", False)
    ]


def _tied(model: nn.Module) -> list[Finding]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return [
        Finding(
            "warning",
            f"parameter {names[0]!r}",
            f"is tied with {', '.join(map(repr, names[1:]))}: it is clipped and noised once",
        )
        for names in owners.values()
        if len(names) > 1
    ]


def _loader(loader: DataLoader[object]) -> list[Finding]:
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    inner = getattr(sampler, "sampler", sampler)
    if isinstance(inner, RandomSampler | SequentialSampler) or not getattr(sampler, "poisson", False):
        kind = "shuffled" if isinstance(inner, RandomSampler) else type(inner).__name__
        what = (
            f"is not Poisson-sampled ({kind}): no epsilon holds for its batches. Pass its dataset to vestige.train, "
            f"which draws Poisson samples itself"
        )
        return [Finding("error", "loader", what)]
    return []


def _some(data: Any, wanted: int = PROBED) -> tuple[list[Tensor], int]:
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Dataset):
        count = len(data)  # type: ignore[arg-type]
        return list(default_collate([data[i] for i in range(min(wanted, count))])), count
    return [part[:wanted] for part in data], len(data[0])


def _inputs(data: Any, batch: Sequence[Tensor]) -> list[Finding]:
    whole = data.tensors if isinstance(data, TensorDataset) else data
    tensors: Sequence[Tensor] = batch if isinstance(whole, Dataset) else whole
    found = []
    for index, part in enumerate(tensors):
        rows = (~_finite_rows(part)).nonzero().flatten()
        if len(rows):
            what = f"{len(rows)} examples hold NaN or infinity (first: {int(rows[0])}); each would contribute nothing"
            found.append(Finding("warning", f"data, tensor {index}", what))
    return found


def _finite_rows(part: Tensor) -> Tensor:
    return part.reshape(len(part), -1).isfinite().all(dim=1)


def _gradients(model: nn.Module, loss: Loss, batch: Sequence[Tensor]) -> list[Finding]:
    """Compare each example's gradient alone and in a batch, and look for parameters without one."""
    device = next(model.parameters()).device
    batch = [part.to(device) for part in batch]
    finite = torch.stack([_finite_rows(part) for part in batch]).all(dim=0)
    batch = [part[finite] for part in batch]
    if len(batch[0]) < 2:
        return []
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def gradient_of_first(company: int) -> dict[str, Tensor]:
        *inputs, targets = (part[:company] for part in batch)
        outputs = call_with(model, parameters, tuple(inputs))
        value = loss(outputs[:1], targets[:1]).sum()
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(parameters, found, strict=True))

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            alone, together = gradient_of_first(1), gradient_of_first(len(batch[0]))
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            return [Finding("error", "model", f"no gradient of one example could be taken: {line}")]
    found = []
    for name in parameters:
        where = f"parameter {name!r}"
        if not together[name].any() and not alone[name].any():
            found.append(
                Finding("warning", where, "is unused: its gradient is zero, so it would move by noise alone; freeze it")
            )
            continue
        gap = (alone[name] - together[name]).norm() / alone[name].norm().clamp(min=1e-12)
        if gap > 1e-3 and not _random(model):
            what = f"mixes examples: its gradient for one changes by {float(gap):.1%} when others join the batch"
            found.append(Finding("error", where, what))
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            found.append(
                Finding("error", f"buffer {name!r}", "is changed by a forward pass: it would hold un-noised data")
            )
            buffer.copy_(buffers[name])
    return found


def _random(model: nn.Module) -> bool:
    """Whether the model draws random numbers, so that two passes differ by themselves."""
    return any(m.training and "dropout" in type(m).__name__.lower() for m in model.modules())
