"""Was this example trained on? Membership inference: attacks that score examples by what a model says of them.

The functions take arrays, of any library's models: logits [examples, classes], or one number per example, of a target
and of shadow models, which the attacker trained on data of which they know who was in. A higher score says "in".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize
from scipy.special import expit, log_softmax, logsumexp

from vestige.accounting.lower_bounds.roc_and_confidence_intervals import (
    Array,
    Interval,
    area_under_curve,
    check_confidence,
    mean_interval,
    rate_of_detection,
)

OWN_VARIANCE = 32
"""Models on each side from which on an example has a variance of its own in LiRA; with fewer, all examples share one.
Carlini et al. (2022) change at 64 shadow models, which is the same."""
LIKELIEST = 3
"""How many of the largest confidences a shadow attack looks at."""
RIDGE = 1.0


def losses(logits: ArrayLike, labels: ArrayLike) -> Array:
    """The cross-entropy of each example; its negative is the score of a global threshold (Yeom et al. 2018)."""
    outputs, wanted = _outputs(logits, labels)
    return -log_softmax(outputs, axis=1)[np.arange(len(wanted)), wanted]


def logit_confidence(logits: ArrayLike, labels: ArrayLike) -> Array:
    """log(p / (1 - p)) for the confidence p in the right label, from logits: no confidence rounds to 1 here.

    >>> logit_confidence([[0.0, 0.0], [100.0, 0.0]], [0, 0]).tolist()
    [0.0, 100.0]
    """
    outputs, wanted = _outputs(logits, labels)
    rows = np.arange(len(wanted))
    others = outputs.copy()
    others[rows, wanted] = -np.inf
    return outputs[rows, wanted] - logsumexp(others, axis=1)


def output_features(logits: ArrayLike, labels: ArrayLike) -> Array:
    """What a shadow attack knows of each example: the largest confidences in order, loss, correctness and margin."""
    outputs, wanted = _outputs(logits, labels)
    sure = np.sort(log_softmax(outputs, axis=1), axis=1)[:, ::-1][:, :LIKELIEST]
    right = outputs.argmax(axis=1) == wanted
    return np.column_stack([np.exp(sure), losses(outputs, wanted), right, logit_confidence(outputs, wanted)])


def lira(target: ArrayLike, shadows: ArrayLike, members: ArrayLike, *, online: bool = True) -> Array:
    """Score examples by the likelihood-ratio attack of Carlini et al. (2022).

    `target` has one number for each example, its `logit_confidence` at the attacked model, [n]; `shadows` the same of
    every shadow model, [models, n], and `members` says which examples each was trained on. Online, an example's score
    is the log-likelihood ratio of two normal distributions, of models with and without it; offline, it is how many
    deviations the target lies above the models without it, and the others are not looked at. With few models, all
    examples share one variance for each side.
    """
    point, seen, inside = _of_models(target, shadows, members, "shadows")
    mean, spread = _normals(seen, ~inside, "without")
    if not online:
        return (point - mean) / spread
    mean_in, spread_in = _normals(seen, inside, "with")
    out, within = (point - mean) / spread, (point - mean_in) / spread_in
    return 0.5 * (out**2 - within**2) + np.log(spread / spread_in)


def by_shadow_models(target: ArrayLike, shadows: ArrayLike, members: ArrayLike) -> Array:
    """Score examples by a classifier of members, trained on shadow models (Shokri et al. 2017, with one logistic
    regression in the place of a network for each class).

    `target` are features of the examples at the attacked model, [n, features], such as `output_features`; `shadows`
    those at every shadow model, [models, n, features].
    """
    features, seen, inside = _of_models(target, shadows, members, "shadows")
    if features.ndim != 2:
        raise ValueError(f"target: features have the shape [examples, features], not {features.shape}")
    known, wanted = seen.reshape(-1, features.shape[1]), inside.ravel().astype(np.float64)
    centre, scale = known.mean(axis=0), known.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    rows = (known - centre) / scale

    def cost(weights: Array) -> tuple[float, Array]:
        slopes, offset = weights[:-1], weights[-1]
        scores = rows @ slopes + offset
        error = expit(scores) - wanted
        value = np.logaddexp(0, scores).sum() - wanted @ scores + 0.5 * RIDGE * slopes @ slopes
        return float(value) / len(rows), np.append(error @ rows + RIDGE * slopes, error.sum()) / len(rows)

    found = minimize(cost, np.zeros(rows.shape[1] + 1), jac=True, method="L-BFGS-B").x
    return np.asarray((features - centre) / scale @ found[:-1] + found[-1])


# --- how well an attack does -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Success:
    """How well an attack separates members from non-members, over the targets."""

    area: Interval
    """Under the ROC: 1/2 for guessing."""
    detected_at_1_percent: Interval
    """Members detected where a hundredth of the others is (TPR at FPR 1e-2)."""
    detected_at_1_permille: Interval
    """The same at FPR 1e-3; with fewer than a thousand others, where none of them is."""
    areas: tuple[float, ...]
    """Of each target."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def success(scores: Sequence[ArrayLike], members: Sequence[ArrayLike], confidence: float = 0.95) -> Success:
    """Judge an attack's scores, an array for each target, by who was a member of each.

    Of several targets, means with Student's intervals over targets: they are for further targets of the same examples
    and shadow models. Of one target, intervals over examples, as if their scores were independent (DeLong; Clopper and
    Pearson).
    """
    check_confidence(confidence)
    if not scores or len(scores) != len(members):
        raise ValueError(f"scores of {len(scores)} targets and members of {len(members)}: give one of each, and some")
    sides = []
    for each, who in zip(scores, members, strict=True):
        found, there = np.asarray(each, dtype=np.float64), np.asarray(who, dtype=bool)
        if found.shape != there.shape or there.all() or not there.any():
            raise ValueError(f"members: {there.sum()} of {there.shape} are in, for scores of the shape {found.shape}")
        sides.append((found[there], found[~there]))
    measures = (
        lambda a, b: area_under_curve(a, b, confidence),
        lambda a, b: rate_of_detection(a, b, 1e-2, confidence),
        lambda a, b: rate_of_detection(a, b, 1e-3, confidence),
    )
    area, percent, permille = ([measure(a, b) for a, b in sides] for measure in measures)
    whole = [each[0] if len(each) == 1 else _over_targets(each, confidence) for each in (area, percent, permille)]
    return Success(whole[0], whole[1], whole[2], tuple(each.estimate for each in area))


def _over_targets(found: Sequence[Interval], confidence: float) -> Interval:
    """All measures are shares: so are the ends. Where all targets agree, such as on no detection at all, the spread of
    a few says nothing, and the ends are those over examples."""
    mean = mean_interval([each.estimate for each in found], confidence)
    if mean.low == mean.high:
        low, high = (float(np.mean(ends)) for ends in zip(*((each.low, each.high) for each in found), strict=True))
        return Interval(mean.estimate, low, high, confidence)
    return Interval(mean.estimate, max(0.0, mean.low), min(1.0, mean.high), confidence)


# --- checks ----------------------------------------------------------------------------------------------------------


def _outputs(logits: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    outputs, wanted = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if outputs.ndim != 2 or outputs.shape[1] < 2 or wanted.shape != outputs.shape[:1]:
        raise ValueError(
            f"logits: the shape {outputs.shape} with labels of {wanted.shape}: give [examples, classes] and [examples]"
        )
    if wanted.dtype.kind not in "iu" or wanted.min() < 0 or wanted.max() >= outputs.shape[1]:
        raise ValueError(f"labels: they must be whole numbers from 0 to {outputs.shape[1] - 1}")
    if not np.isfinite(outputs).all():
        raise ValueError("logits: some are not finite; the model has diverged, train it at a smaller learning rate")
    return outputs, wanted


def _of_models(target: ArrayLike, shadows: ArrayLike, members: ArrayLike, name: str) -> tuple[Array, Array, Array]:
    point, seen = np.asarray(target, dtype=np.float64), np.asarray(shadows, dtype=np.float64)
    inside = np.asarray(members, dtype=bool)
    if seen.shape[1:] != point.shape or inside.shape != seen.shape[:2]:
        raise ValueError(
            f"{name}: the shape {seen.shape} with members of {inside.shape} and a target of {point.shape}; give "
            "[models, examples], each with what the target has"
        )
    return point, seen, inside


def _normals(seen: Array, used: Array, side: str) -> tuple[Array, Array]:
    """Mean and deviation of every example over the models that are used for it."""
    count = used.sum(axis=0)
    if (count < 1).any() or (count < 2).all():
        raise ValueError(
            f"members: {int((count < 1).sum())} examples have no shadow model {side} them, and two are needed for a "
            "variance; train more shadow models, half of them on each example"
        )
    mean = np.where(used, seen, 0.0).sum(axis=0) / count
    squares = np.where(used, (seen - mean) ** 2, 0.0).sum(axis=0)
    shared = squares.sum() / (count - 1).sum()
    own = squares / np.maximum(count - 1, 1) if count.min() >= OWN_VARIANCE else shared
    # An output that no training moves has no variance; any deviation is then infinitely surprising, but a number.
    return mean, np.sqrt(np.maximum(own, 1e-12))
