"""How far does one example move the clipped sum? Measured on runs almost without noise, over the public interfaces.

A dataset of six examples is trained on for one step at sampling rate 1, by plain SGD and with noise of a millionth of
the bound: how far the parameters went, times the size of the dataset, is the clipped sum. The same is done without one
example, from the same weights. The two sums may differ by the bound, and by nothing more; what else the model holds,
buffers and frozen parameters, may not differ at all. The bound is the median norm of the examples' own gradients: some
are clipped, and the others show whatever else moves them. Where terms of a gradient may cancel, a thousandth of that is
tried too.

In a loop the number of rows is public: an example that is not there leaves a blank row. And where a model draws random
numbers, the others' masks would be other ones without the example. There the example's row is replaced instead: by one that is not a number, which counts for nothing, so that the bound stays what it is; or,
where inputs are whole numbers, by another example, which may add the bound once more. And the sum of that example by
itself must be within the bound.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import vestige

EXAMPLES, ODD = 6, 2
"""How many examples there are, and which of them is the outlier."""
FARTHEST, NOISE, TIGHT = 8.0, 1e-6, 1e-3
"""How far one example may move the parameters, times the number of examples; the noise multiplier; what a tight bound
is of the usual one."""
TOLERANCE = 1e-3
PATHS = ("train", "loop")
OUTLIERS = ("none", "times 1000", "times 1e8", "nan", "infinite", "times 1e30")
CANCELLING = ("none", "times 1e8", "repeated")
"""Where a tight bound is tried too."""
REPEATED = ("none", "repeated")
"""Of whole numbers: an outlier says the same thing over and over."""

Data = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its loss, as somebody wrote them."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Data]
    """So many examples: inputs, and targets last."""
    loss: Callable[..., Tensor] = F.cross_entropy
    criterion: bool = False
    """Whether the loop takes its loss by `engine.criterion`."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What the loop calls model and loss in."""
    outlying: tuple[int, ...] | None = None
    """Which tensors an outlier is odd in; None: all that are not whole numbers."""
    random: bool = False
    """Whether the model draws random numbers."""
    daily: bool = False
    refused: dict[str, str] | str = field(default_factory=dict)
    """By path, or for both: a part of the message with which it must be refused."""
    raises: tuple[str, ...] = ()
    """Outliers with which the user's own code raises, in ordinary training and in a loop; `vestige.train` leaves such a
    row out."""
    assumed: bool = False
    """Whether the loop's loss mixes examples where that cannot be seen: the guarantee must say what it assumes."""
    tolerance: float = TOLERANCE
    """By how much more than its bound an example may move the sum, relatively."""

    def refusal(self, path: str) -> str | None:
        return self.refused if isinstance(self.refused, str) else self.refused.get(path)


@dataclass(frozen=True)
class Found:
    """What one case gave on one path: by outlier, the largest move over its bound, or the message of its refusal."""

    ratios: dict[str, float]
    refusals: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{kind}: {ratio:.6g} of the bound" for kind, ratio in self.ratios.items()]
        return "; ".join(lines + [f"{kind}: refused, {message!r}" for kind, message in self.refusals.items()])


def measured(case: Case, path: str) -> Found:
    ratios: dict[str, float] = {}
    refusals: dict[str, str] = {}
    rows, usual = made(case), usual_bound(case)
    runs = [Runs(case, path, usual), Runs(case, path, TIGHT * usual)]
    for kind in kinds(case, rows):
        odd = with_outlier(case, rows, kind)
        if kind in case.raises and path == "loop":
            ratios |= {} if raises_alike(runs[0], odd) else {kind: math.inf}
            continue
        try:
            ratios[kind] = max(worst(moves(run, odd, kind)) for run in runs[: 1 + (kind in CANCELLING)])
        except (ValueError, RuntimeError) as problem:  # torch's own, at any data
            refusals[kind] = str(problem)
            ratios |= {
                f"{kind}, without {gone}": math.inf for gone in (ODD, EXAMPLES - 1) if answered(runs[0], odd, gone)
            }
    return Found(ratios, refusals)


def answered(run: Runs, rows: Data, gone: int) -> bool:
    """Whether a step is taken without an example, or was with everyone: a refusal must not depend on who is there."""
    with suppress(ValueError, RuntimeError):
        run.of(chosen(rows, [row for row in range(EXAMPLES) if row != gone]))
    return bool(run.known)


def raises_alike(run: Runs, rows: Data) -> bool:
    """Whether a private step raises what an ordinary pass raises: nothing of ours."""
    data = chosen(rows, list(range(EXAMPLES)))
    found: list[type[Exception]] = []
    for way in (lambda: run.case.loss(fresh(run.case)(*data[:-1]), data[-1]), lambda: run.of(data)):
        try:
            way()
        except Exception as problem:
            found.append(type(problem))
    return len(found) == 2 and found[0] is found[1] is not ValueError


def made(case: Case) -> Data:
    """The examples; one more than there will be, to replace another."""
    torch.manual_seed(1)
    return case.data(EXAMPLES + 1)


def fresh(case: Case) -> nn.Module:
    """The model, always with the same weights."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.model().train()


def usual_bound(case: Case) -> float:
    """The median norm of single examples' gradients, by ordinary autograd; where there is none, a tenth."""
    norms = []
    for row in zip(*made(case), strict=True):
        model = fresh(case)
        *inputs, target = (part[None] for part in row)
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            case.loss(model(*inputs), target).sum().backward()
            grads = [p.grad.to_dense().double().norm() for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.stack(grads).norm()))
    known = sorted(norm for norm in norms if 1e-4 < norm < math.inf)
    return known[len(known) // 2] if known else 0.1


def worst(ratios: Iterator[float]) -> float:
    return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)


def moves(run: Runs, rows: Data, kind: str) -> Iterator[float]:
    """How far examples move the sum, relative to what each may."""
    everyone, others = list(range(EXAMPLES)), (0, EXAMPLES - 1) if kind == "none" else (EXAMPLES - 1,)
    data = chosen(rows, everyone)
    for gone in (ODD, *others):
        if run.case.random or (run.path == "loop" and any(part.is_floating_point() for part in data[:-1])):
            replaced, allowed = replacement(data, rows, gone, blank="nan" not in run.case.raises)
            yield run.distance(data, replaced) / allowed
            yield run.size(chosen(rows, [gone]))
        else:
            yield run.distance(data, chosen(rows, [row for row in everyone if row != gone]))


def replacement(data: Data, rows: Data, gone: int, blank: bool) -> tuple[Data, float]:
    """The data with another row in the place of one, and how many bounds that may move the sum: a `blank` one has no
    gradient."""
    changed = tuple(part.clone() for part in data)
    for part in changed[:-1]:
        if blank and part.is_floating_point():
            part[gone] = torch.nan
            return changed, 1.0
    for part, spare in zip(changed, rows, strict=True):
        part[gone] = spare[EXAMPLES]
    return changed, 2.0


def chosen(rows: Data, places: list[int]) -> Data:
    return tuple(part[places].clone() for part in rows)


# --- outliers ---------------------------------------------------------------------------------------------------------


def kinds(case: Case, rows: Data) -> tuple[str, ...]:
    return OUTLIERS if odd_parts(case, rows) else REPEATED


def odd_parts(case: Case, rows: Data) -> tuple[int, ...]:
    if case.outlying is not None:
        return case.outlying
    return tuple(place for place, part in enumerate(rows) if part.is_floating_point())


def with_outlier(case: Case, rows: Data, kind: str) -> Data:
    changed = tuple(part.clone() for part in rows)
    if kind == "repeated":
        changed[0][ODD] = changed[0][ODD].flatten()[0]
    for place in odd_parts(case, rows):
        make_odd(changed[place].view(len(changed[place]), -1)[ODD], kind)
    return changed


def make_odd(row: Tensor, kind: str) -> None:
    if kind == "nan":
        row[0] = torch.nan
    elif kind == "infinite":
        row[0] = torch.inf
    elif kind.startswith("times"):
        row *= float(kind.removeprefix("times "))


# --- the clipped sum --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """SENSITIVE: what one step on a dataset makes of the model, with one bound; the same dataset is trained on once."""

    case: Case
    path: str
    bound: float
    known: dict[tuple[bytes, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def distance(self, one: Data, other: Data) -> float:
        """Between the two sums, in bounds; infinite, if anything else has become another."""
        (first, kept), (second, also_kept) = self.of(one), self.of(other)
        if not torch.equal(kept, also_kept):  # nor is anything equal that is not a number
            return math.inf
        return float((first - second).norm()) / self.bound

    def size(self, data: Data) -> float:
        return float(self.of(data)[0].norm()) / self.bound

    def of(self, data: Data) -> tuple[Tensor, Tensor]:
        """The clipped sum, and all else that the model holds afterwards."""
        key = tuple(part.numpy().tobytes() for part in data)
        if key not in self.known:
            self.known[key] = self._trained(data)
        return self.known[key]

    def _trained(self, data: Data) -> tuple[Tensor, Tensor]:
        model, lr = fresh(self.case), FARTHEST / self.bound
        before = flat(model.parameters(), trainable=True)
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (by_train if self.path == "train" else by_loop)(self.case, model, data, self.bound, lr)
        total = (before - flat(model.parameters(), trainable=True)) * len(data[0]) / lr
        return total, flat([*model.parameters(), *model.buffers()], trainable=False)


def flat(tensors: Iterable[Tensor], trainable: bool) -> Tensor:
    return torch.cat([torch.zeros(0), *(t.detach().double().ravel() for t in tensors if t.requires_grad is trainable)])


def by_train(case: Case, model: nn.Module, data: Data, bound: float, lr: float) -> None:
    training = vestige.train(
        model, case.loss, data, method=vestige.make_method("dp-sgd", clip=bound), sample_rate=1.0, steps=1, delta=1e-5,
        noise_multiplier=NOISE, lr=lr, reproducible=0,
    )  # fmt: skip
    for _ in training:
        pass


def said_of_the_loss(case: Case) -> str:
    """What the guarantee of a loop says about its loss."""
    data = chosen(made(case), list(range(EXAMPLES)))
    return (
        by_loop(case, fresh(case), data, usual_bound(case), 0.1)
        .guarantee(delta=1e-5)
        .assumption("loss_per_example")
        .status
    )


def by_loop(case: Case, model: nn.Module, data: Data, bound: float, lr: float) -> vestige.PrivacyEngine:
    engine = vestige.PrivacyEngine(reproducible=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), noise_multiplier=NOISE, max_grad_norm=bound,
        data_loader=DataLoader(TensorDataset(*data), batch_size=len(data[0])),
    )  # fmt: skip
    loss = engine.criterion(case.loss) if case.criterion else case.loss
    for *inputs, targets in loader:
        optimizer.zero_grad()
        with case.around():
            value = loss(model(*inputs), targets)
        value.backward()
        optimizer.step()
    return engine
