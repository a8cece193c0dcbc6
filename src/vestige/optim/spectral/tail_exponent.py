"""How heavy is the tail of a layer's spectrum? The power-law exponent of its weights, as WeightWatcher fits it.

`exponents` finds them at once; `Background` finds them on threads of the CPU, while training continues.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import chain, islice
from threading import Barrier
from typing import Literal, cast

import torch
from torch import Tensor

Convention = Literal["flatten", "per-position"]

FEWEST = 10
"""With fewer eigenvalues than this a power law cannot be recognized: the exponent is undefined."""

FLOOR = 1e-5
"""WeightWatcher fits only eigenvalues above this, an absolute cut: the exponent is scale invariant above it alone."""

NARROWEST = 1e-4
"""A spectrum narrower than this, relatively, is one point blurred by float32's rounding, not a tail."""

WORTH_DIVIDING = 1 << 26
"""Spectra that take fewer operations than this are found by one thread."""
PROBES = 24
CHUNK = 1 << 21
SHORT = 128
"""A spectrum of up to this many eigenvalues has every tail measured at once: pruning them would take longer."""
BLOCKS = 4
"""Gram matrices of SHORT rows or more are computed in so many blocks of rows, below the diagonal alone."""


def exponent(weight: Tensor, convention: Convention = "flatten", floor: float = FLOOR) -> float:
    """The exponent of one weight; NaN where it is undefined."""
    return exponents([weight], convention, floor).item()


def exponents(weights: Sequence[Tensor], convention: Convention = "flatten", floor: float = FLOOR) -> Tensor:
    """The exponent of each weight, [len(weights)], NaN where undefined, on the weights' device (for MPS: on the CPU).

    All layers are fitted at once. Every eigenvalue is tried as the start of the tail; the exponent is the maximum
    likelihood one of the tail that lies closest to its power law in the Kolmogorov-Smirnov distance. This one rule
    serves every spectrum of FEWEST or more; WeightWatcher 0.7.7 has another, bias-corrected, for fewer than 20.

    Formal guarantees: none needed. It is a function of the weights alone, so of past releases: computing it, however
    often, costs no privacy.
    """
    return _found([_matrices(weight, convention) for weight in weights], floor)


def _found(matrices: list[Tensor], floor: float, squared: bool = False) -> Tensor:
    """Exponents from weights as matrices, or (`squared`) from their Gram matrices."""
    return _solved(matrices, floor, squared) if matrices else torch.empty(0, dtype=torch.float64)


def _matrices(weight: Tensor, convention: Convention) -> Tensor:
    """[how many, rows, columns], a view.

    A convolution [out, in, *kernel] is one matrix [out, in * kernel] ("flatten"), or one matrix [out, in] per kernel
    position whose eigenvalues are pooled ("per-position", WeightWatcher's own reading).
    """
    if weight.ndim < 2:
        raise ValueError(f"weight of shape {tuple(weight.shape)} has no spectrum; give one of two or more dimensions")
    if convention not in ("flatten", "per-position"):
        raise ValueError(f"convention={convention!r} is unknown; choose 'flatten' or 'per-position'")
    weight = weight.detach()
    if weight.device.type == "mps":  # it has no float64
        weight = weight.cpu()
    if weight.ndim == 2 or convention == "flatten":
        return weight.flatten(1).unsqueeze(0)
    return weight.flatten(2).permute(2, 0, 1)


def _by_size(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Which of them have Gram matrices of one size, the largest first."""
    by_size: dict[int, list[int]] = {}
    for index in sorted(range(len(matrices)), key=lambda index: -min(matrices[index].shape[1:])):
        by_size.setdefault(min(matrices[index].shape[1:]), []).append(index)
    return list(by_size.values())


def _solved(matrices: list[Tensor], floor: float, squared: bool = False) -> Tensor:
    """`_fitted`, on a CPU in TorchScript where torch has it: the same operations in the same order, for all of which a
    thread holds Python's lock once. A hundred small ones, each of which asks for it, would keep the training waiting.
    """
    sizes = _by_size(matrices)
    script = _script() if matrices[0].device.type == "cpu" else None
    if script is None:
        return _fitted(matrices, sizes, floor, squared)
    try:
        return script(matrices, sizes, floor, squared)
    except RuntimeError:  # TorchScript's own wording
        return _fitted(matrices, sizes, floor, squared)


Solver = Callable[[list[Tensor], list[list[int]], float, bool], Tensor]


@cache
def _script() -> Solver | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated: without it a spectrum takes longer, and is the same
            return cast(Solver, torch.jit.script(_fitted))
    except Exception:
        return None


# From here to `_deviation` TorchScript reads the functions too: their names and types are such as it understands.


def _fitted(matrices: list[Tensor], sizes: list[list[int]], floor: float, squared: bool) -> Tensor:
    """The exponent of each weight; `sizes` are those of one size each (`_by_size`)."""
    return _fit(_aligned(_spectra(matrices, sizes, squared)), floor)


def _spectra(matrices: list[Tensor], sizes: list[list[int]], squared: bool) -> list[Tensor]:
    """The squared singular values of each weight, ascending; NaN if it is not finite. Matrices of one size are
    decomposed together; `squared` says that they are Gram matrices already."""
    spectra = [torch.empty(0)] * len(matrices)
    for members in sizes:
        values = _eigenvalues(torch.cat([matrices[index] if squared else _gram(matrices[index]) for index in members]))
        start = 0
        for index in members:
            stop = start + matrices[index].shape[0]
            spectra[index] = values[start:stop].flatten().sort()[0]
            start = stop
    return spectra


def _gram(matrices: Tensor, short: int = SHORT, blocks: int = BLOCKS) -> Tensor:
    """The smaller of the two Gram matrices, in float64: its eigenvalues are all the squared singular values.

    Of a large one only blocks on and below the diagonal are filled: `eigvalsh` reads no others.
    """
    wide = matrices.double()
    if wide.shape[-2] > wide.shape[-1]:
        wide = wide.transpose(-2, -1)
    turned, n = wide.transpose(-2, -1), wide.shape[-2]
    if n < short or wide.is_cuda:
        return wide @ turned
    grams = wide.new_zeros([wide.shape[0], n, n])
    for block in range(blocks):
        first, last = block * n // blocks, (block + 1) * n // blocks
        grams[:, first:last, :last] = wide[:, first:last] @ turned[:, :, :last]
    return grams


def _aligned(spectra: list[Tensor]) -> Tensor:
    """Spectra of any lengths, with zeros at the front: [weights, longest]."""
    longest = max([each.shape[0] for each in spectra])
    return torch.stack([torch.nn.functional.pad(each, [longest - each.shape[0], 0]) for each in spectra])


def _eigenvalues(grams: Tensor) -> Tensor:
    """[..., n, n] -> [..., n]; NaN where a matrix is not finite, at which LAPACK would stop."""
    usable = grams.isfinite().all(dim=-1).all(dim=-1)[:, None]
    values = torch.linalg.eigvalsh(torch.where(usable[..., None], grams, 0.0))
    return torch.where(usable, values, torch.nan)


def _fit(spectra: Tensor, floor: float, fewest: int = FEWEST, narrowest: float = NARROWEST) -> Tensor:
    """Exponents of spectra sorted ascending and padded with zeros at the front: [layers, n] -> [layers].

    Right-aligned like this, a tail that begins at column i has n - i members in every layer.
    """
    valid = spectra > floor  # False for NaN
    logs = torch.where(valid, spectra, 1.0).log()
    n = logs.shape[-1]
    members = torch.arange(n, 0, -1, device=logs.device)
    excess = logs.flip(-1).cumsum(-1).flip(-1) - members * logs
    slopes = members / excess  # maximum likelihood: exponent - 1
    candidate = valid & (slopes > 0) & slopes.isfinite() & (members > 1)
    distances = _distances(logs, slopes, candidate)
    best = distances.argmin(dim=-1, keepdim=True)
    chosen = 1 + slopes.gather(-1, best).squeeze(-1)
    lowest = torch.where(valid, logs, torch.inf).amin(dim=-1)
    defined = (valid.sum(-1) >= fewest) & (logs[:, -1] - lowest > narrowest) & candidate.any(-1)
    defined &= ~spectra.isnan().any(-1)
    return torch.where(defined, chosen, torch.nan)


def _distances(logs: Tensor, slopes: Tensor, candidate: Tensor, short: int = SHORT) -> Tensor:
    """Kolmogorov-Smirnov distance of each tail to its own power law; infinity for a tail that cannot be the best.

    Of a long spectrum, a few probes along each tail bound its distance from below. A tail whose bound exceeds the best
    distance found is never measured in full, so the least distance is exact and costs far less than n squared.
    """
    layers, n = logs.shape
    if n <= short:
        return _all_distances(logs, slopes).masked_fill(~candidate, torch.inf)
    bounds = torch.where(candidate, _probed(logs, slopes), torch.inf)
    distances = torch.full_like(bounds, torch.inf)
    first = bounds.topk(min(8, n), dim=-1, largest=False).indices
    rows = torch.arange(layers, device=logs.device)[:, None].expand_as(first)
    _measure(distances, logs, slopes, rows.flatten(), first.flatten())
    distances.masked_fill_(~candidate, torch.inf)
    slack = 1e-12  # the two passes may round differently
    rest = candidate & distances.isinf() & (bounds <= distances.amin(dim=-1, keepdim=True) + slack)
    found = rest.nonzero()
    _measure(distances, logs, slopes, found[:, 0], found[:, 1])
    return distances


def _all_distances(logs: Tensor, slopes: Tensor, chunk: int = CHUNK) -> Tensor:
    """The exact distance of every tail, some layers at a time."""
    layers, n = logs.shape
    ranks = torch.arange(n, device=logs.device)
    behind = ranks - ranks[:, None]
    empirical = behind / (n - ranks)[:, None]
    distances, most = torch.empty_like(logs), max(1, chunk // (n * n))
    for first in range(0, layers, most):
        some, slope = logs[first : first + most], slopes[first : first + most]
        deviation = _deviation(some[:, None] - some[..., None], slope[..., None], empirical)
        distances[first : first + most] = torch.where(behind >= 0, deviation, 0.0).amax(dim=-1)
    return distances


def _probed(logs: Tensor, slopes: Tensor, probes: int = PROBES) -> Tensor:
    """The distance at so many ranks spread over each tail: a lower bound."""
    layers, n = logs.shape
    starts = torch.arange(n, device=logs.device)
    shares = torch.linspace(0, 1, probes, dtype=logs.dtype, device=logs.device)
    ranks = (shares * (n - 1 - starts)[:, None]).long()
    places = (starts[:, None] + ranks).flatten()
    gaps = logs[:, places].view(layers, n, probes) - logs[..., None]
    return _deviation(gaps, slopes[..., None], ranks / (n - starts)[:, None]).amax(dim=-1)


def _measure(distances: Tensor, logs: Tensor, slopes: Tensor, rows: Tensor, starts: Tensor, chunk: int = CHUNK) -> None:
    """Fill in the exact distance of the tails that begin at (rows, starts), some of them at a time."""
    n = logs.shape[-1]
    ranks, most = torch.arange(n, device=logs.device), max(1, chunk // n)
    for first in range(0, rows.shape[0], most):
        row, start = rows[first : first + most], starts[first : first + most]
        here = start[:, None]
        gaps = logs[row] - logs[row, start][:, None]
        empirical = (ranks - here) / (n - here)
        deviation = _deviation(gaps, slopes[row, start][:, None], empirical)
        distances[row, start] = torch.where(ranks >= here, deviation, 0.0).amax(dim=-1)


def _deviation(gaps: Tensor, slopes: Tensor, empirical: Tensor) -> Tensor:
    """|power law's distribution function - the share of the tail strictly below|, `gaps` being ln(x / tail's start)."""
    return (-torch.expm1(-slopes * gaps) - empirical).abs()


# --- while training goes on -------------------------------------------------------------------------------------------

AT_ONCE = 4
"""Spectra that are worked on at once."""


class Background:
    """`exponents`, found on threads of the CPU. The weights must stay as they are until `result` has returned.

    Each thread uses one core, so the result is the same, bit for bit, on any number of them and in any order. Of
    weights on a GPU the Gram matrices are taken there, and only these travel to the host. The eigenvalues of a few
    hundred rows are a long chain of tiny steps, which a core does faster, and other cores for other matrices meanwhile.
    """

    def __init__(self, weights: Sequence[Tensor], convention: Convention = "flatten", floor: float = FLOOR) -> None:
        self._future: Future[Tensor] | None = None
        self._landed: torch.cuda.Event | None = None
        matrices = [_matrices(weight, convention) for weight in weights]
        on_gpu, large = bool(matrices) and matrices[0].is_cuda, _work(matrices) >= WORTH_DIVIDING
        if on_gpu:
            matrices = self._send(_grams(matrices))
        find = _Threads.divided if large else _Threads.whole
        self._work: Callable[[_Threads], Future[Tensor]] | None = partial(
            find, matrices=matrices, floor=floor, squared=on_gpu
        )
        self.go_on()

    def go_on(self) -> None:
        """Hand the work to the threads if they have not got it: from a GPU, if the matrices have arrived.

        Called on the training's own thread, so that no other one calls CUDA: that would break off a recording.
        """
        if self._work is not None and (self._landed is None or self._landed.query()):
            self._future = self._work(_threads(os.getpid()))
            self._work = None  # and with it the weights

    def result(self) -> Tensor:
        """The exponents, on the CPU."""
        if self._work is not None and self._landed is not None:
            self._landed.synchronize()
        self.go_on()
        assert self._future is not None
        return self._future.result()

    def _send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for these, filled once `_landed` is over."""
        flat = torch.cat([each.flatten() for each in tensors])
        here = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
        self._landed = torch.cuda.Event()
        self._landed.record(torch.cuda.current_stream(flat.device))
        parts = here.split([each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _grams(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The Gram matrix of each; those of one shape by one product, since a GPU would wait for launches."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, each in enumerate(matrices):
        by_shape.setdefault(each.shape, []).append(index)
    grams: dict[int, Tensor] = {}
    for members in by_shape.values():
        together = _gram(torch.cat([matrices[index] for index in members]))
        grams |= dict(zip(members, together.chunk(len(members)), strict=True))
    return [grams[index] for index in range(len(matrices))]


def _work(matrices: Sequence[Tensor]) -> int:
    """About how many operations their spectra take."""
    return sum(each.numel() * min(each.shape[1:]) for each in matrices)


class _Threads:
    """As many threads as torch uses, less the training's own, for eigenvalues; a few more that fit what they find."""

    def __init__(self) -> None:
        _script()  # on the training's thread: warnings are turned off for all of them
        self._count = max(1, torch.get_num_threads() - 1)
        self._solving, self._fitting = _single(self._count), _single(AT_ONCE)

    def whole(self, matrices: list[Tensor], floor: float, squared: bool) -> Future[Tensor]:
        """By one thread; `squared` says that the matrices are Gram matrices already."""
        return self._fitting.submit(_found, matrices, floor, squared)

    def divided(self, matrices: list[Tensor], floor: float, squared: bool) -> Future[Tensor]:
        """By all of them."""
        return self._fitting.submit(self._divided, matrices, floor, squared)

    def _divided(self, matrices: list[Tensor], floor: float, squared: bool) -> Tensor:
        squares = matrices if squared else list(self._solving.map(_gram, matrices))
        sizes = _by_size(squares)
        parts = [torch.cat([squares[index] for index in members]).chunk(self._count) for members in sizes]
        found = self._solving.map(_eigenvalues, chain(*parts))  # the largest first
        spectra: dict[int, Tensor] = {}
        for members, mine in zip(sizes, parts, strict=True):
            values = torch.cat(list(islice(found, len(mine)))).split([len(squares[index]) for index in members])
            spectra |= {index: part.flatten().sort().values for index, part in zip(members, values, strict=True)}
        aligned = _aligned([spectra[index] for index in range(len(squares))])
        return torch.cat(list(self._solving.map(partial(_fit, floor=floor), aligned.chunk(self._count))))


@cache
def _threads(process: int) -> _Threads:
    """The threads of this process: a forked one has none of its parent's."""
    return _Threads()


def _single(count: int) -> ThreadPoolExecutor:
    """Threads in each of which torch uses one core."""
    usual, all_there = torch.get_num_threads(), Barrier(count)
    pool = ThreadPoolExecutor(count, "spectrum", _alone)
    list(pool.map(lambda _: all_there.wait(), range(count)))
    torch.set_num_threads(usual)  # which is also what threads that start later begin with
    return pool


def _alone() -> None:
    """This thread uses one core. torch would set it to all of them when the thread first asks how many there are."""
    torch.set_num_threads(1)
    torch.get_num_threads()
