"""Which methods keep only updates that pass a noisy loss test? DPSUR and DPSGD-BR."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Annotated, Any, cast

from vestige.checks import renamed
from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.options import Bound, Momentum
from vestige.methods.registry import Neutral, options_of, register
from vestige.optim.gates import BufferedRejection, NoisyLossTest
from vestige.optim.progress_driven_decay import (
    Decay,
    NoDecay,
    NoisyCount,
    NoisyLosses,
    PhasedDecay,
    ProgressSignal,
    PublicAccuracy,
)
from vestige.optim.rules import sgd

SigmaT = Annotated[float | None, "noise multiplier of the gradient (default: from the budget)"]
SigmaV = Annotated[float, "noise multiplier of the loss difference (sigma_v)"]
ClipLoss = Annotated[float, "range to which the change of the mean loss is clipped (C_v)"]
ClipEach = Annotated[float | None, "clip each example's loss difference too, and divide by a constant"]
Threshold = Annotated[float, "accept below this many --clip-loss (beta); inf accepts everything"]
ValidationBatch = Annotated[float, "expected number of examples in a loss test"]
Accounting = Annotated[
    str,
    "trial-level: a trial is one question whose reject bit and accepted candidate are public (dominating pair); "
    "every-trial: one gradient and one loss question each, charged in full",
]


RELEASES = "per trial: whether it was accepted, and the move if it was"
PRICE = "M trials x the trial's dominating pair; by every-trial: M x (SGM(q, sigma_t) + SGM(q_v, sigma_v))"
TEST = {"multiplier": "sigma_v", "each": "clip_each", "expected_batch": "validation_batch"}
"""The papers' names for the fields of the loss test."""
ACCEPTS = {"threshold": inf, "max_grad_norm": 1.0, "momentum": 0.0}


@register(
    "Fu et al., DPSUR: selective update and release, PVLDB 17(6), 2024; arXiv:2311.14056",
    "fu2024dpsur",
    "selection",
    releases=RELEASES,
    price=PRICE,
    neutral=Neutral(ACCEPTS),
    letters=TEST,
)
def dpsur(
    *,
    max_grad_norm: Bound = 0.1,
    momentum: Momentum = 0.9,
    sigma_t: SigmaT = None,
    sigma_v: SigmaV = 1.3,
    clip_loss: ClipLoss = 1e-3,
    clip_each: ClipEach = None,
    threshold: Threshold = -1.0,
    validation_batch: ValidationBatch = 256,
    accounting: Accounting = "trial-level",
) -> Method:
    """DP-SGD that keeps a move only if a noisy loss test on a fresh sample passes it."""
    test = _test(sigma_v, clip_loss, threshold, validation_batch, clip_each, accounting)
    return Method(clip=Flat(max_grad_norm), rule=sgd(momentum), gate=test, noise_multiplier=sigma_t)


@register(
    "Deng et al., Buffered rejection, Scientific Reports, 2026; 10.1038/s41598-026-44009-2",
    "deng2026buffered",
    "selection",
    releases=RELEASES + ", with its noisy loss",
    price=PRICE,
    neutral=Neutral({**ACCEPTS, "buffer": 1, "progress": "none"}),
    letters=TEST,
)
def dpsgd_br(
    *,
    max_grad_norm: Bound = 0.1,
    momentum: Momentum = 0.9,
    sigma_t: SigmaT = None,
    sigma_v: SigmaV = 1.37,
    clip_loss: ClipLoss = 1e-3,
    clip_each: ClipEach = None,
    threshold: Threshold = -1.5,
    validation_batch: ValidationBatch = 256,
    accounting: Accounting = "trial-level",
    buffer: Annotated[int, "accepted candidates to choose among (n)"] = 2,
    theta_k: Annotated[float, "changes that differ by less than this many --clip-loss tie (k)"] = 1.0,
    max_rejects: Annotated[int, "rejections in a row after which one candidate is enough (T_max)"] = 5,
    as_printed: Annotated[bool, "prefer the larger loss, as the paper's equation 16 prints it"] = False,
    progress: Annotated[
        str, "what the decay listens to: noisy-loss (already paid for), public:FILE, noisy-count (charged) or none"
    ] = "noisy-loss",
    decay_fast: Annotated[float, "decay per update while the gain exceeds --progress-threshold"] = 0.999,
    decay_slow: Annotated[float, "decay per update otherwise"] = 0.9999,
    progress_threshold: Annotated[
        float | None,
        "gain that separates the two (p): of accuracy (default 0.005), or with noisy-loss how much more often "
        "candidates lower the loss than raise it (default 0.5)",
    ] = None,
    decay_until: Annotated[float, "epsilon at which the decay stops (epsilon_B)"] = inf,
    count_noise: Annotated[float, "noise of the noisy count, in examples"] = 25.0,
    count_rate: Annotated[float, "probability that an example joins the noisy count"] = 0.1,
) -> Method:
    """Buffered rejection: of several candidates that pass a noisy loss test, the better one; noise decays in phases."""
    test = _test(sigma_v, clip_loss, threshold, validation_batch, clip_each, accounting)
    decay: Decay = NoDecay()
    if progress != "none":
        signal = _signal(progress, count_rate, count_noise)
        with renamed({"fast": "decay_fast", "slow": "decay_slow"}):
            decay = PhasedDecay(signal, decay_fast, decay_slow, progress_threshold, decay_until)
    with renamed({"tie": "theta_k"}):
        gate = BufferedRejection(test, buffer, theta_k, max_rejects, as_printed, decay)
    return Method(clip=Flat(max_grad_norm), rule=sgd(momentum), gate=gate, noise_multiplier=sigma_t)


GRID = 0.02
"""The steps in which the decay of our variant goes."""


@register(
    "Deng et al., Buffered rejection, Scientific Reports, 2026; 10.1038/s41598-026-44009-2",
    "deng2026buffered",
    "selection",
    releases=RELEASES + ", with its noisy loss",
    price=PRICE,
    neutral=Neutral({**ACCEPTS, "buffer": 1, "progress": "none"}),
    letters=TEST,
)
@options_of(dpsgd_br)
def dpsgd_br_stepped(**options: object) -> Method:
    """Our variant of buffered rejection: the decay goes in steps of 2%, and every update begins with a whole buffer."""
    method = dpsgd_br(**options)
    gate = cast(BufferedRejection, method.gate)
    decay = replace(gate.decay, grid=GRID) if isinstance(gate.decay, PhasedDecay) else gate.decay
    return replace(method, gate=replace(gate, decay=decay, refill=True))


def _test(sigma_v: float, clip_loss: float, *others: Any) -> NoisyLossTest:
    with renamed({**TEST, "bound": "clip_loss"}):
        return NoisyLossTest(sigma_v, clip_loss, *others)


def _signal(progress: str, count_rate: float, count_noise: float) -> ProgressSignal:
    if progress == "noisy-loss":
        return NoisyLosses()
    if progress == "noisy-count":
        with renamed({"rate": "count_rate", "multiplier": "count_noise"}):
            return NoisyCount(count_rate, count_noise)
    if progress.startswith("public:") and progress != "public:":
        return PublicAccuracy(progress.removeprefix("public:"))
    why = ""
    if "acc" in progress:
        why = ": the un-noised accuracy of private data may not steer anything, no epsilon would hold"
    raise ValueError(f"progress={progress!r} must be noisy-loss, public:FILE, noisy-count or none{why}")
