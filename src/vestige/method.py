"""What is a private optimizer? One part per question; the named methods are short compositions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vestige.clipping import Clip, Flat
from vestige.memory import Blend, Exponential, Fractional, Identity, Memory, Uniform
from vestige.rules import Rule, sgd

PrivacyClass = Literal["post-processing", "extra release", "selection", "correlated noise"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A private optimizer: clip each example, remember releases, move by a rule.

    Formal guarantees: with Poisson sampling at rate q, each step is one Poisson-subsampled Gaussian mechanism with the
    plan's noise multiplier. Memory and rule see releases only: post-processing, whatever they do.
    """

    name: str
    clip: Clip = field(default_factory=Flat)
    memory: Memory = field(default_factory=Identity)
    rule: Rule = field(default_factory=sgd)


@dataclass(frozen=True)
class Entry:
    """A named method: how to make it, and what a reader should know."""

    name: str
    make: Callable[..., Method]
    summary: str
    reference: str
    privacy_class: PrivacyClass

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.make, eval_str=True).parameters)


METHODS: dict[str, Entry] = {}


def register(name: str, reference: str, privacy_class: PrivacyClass = "post-processing") -> Callable[..., Callable[..., Method]]:
    def add(make: Callable[..., Method]) -> Callable[..., Method]:
        METHODS[name] = Entry(name, make, (make.__doc__ or "").strip().split("\n")[0], reference, privacy_class)
        return make

    return add


def build(name: str, **options: Any) -> Method:
    """A method by name, with its options; an unknown name or option is refused with the nearest known one."""
    entry = METHODS.get(name)
    if entry is None:
        raise ValueError(f"method={name!r} is unknown{nearest(name, METHODS)}; choose from {', '.join(METHODS)}")
    unknown = [key for key in options if key not in entry.options]
    if unknown:
        known = ", ".join(entry.options)
        raise ValueError(f"{unknown[0]}={options[unknown[0]]} is not an option of {name}; its options are {known}")
    return entry.make(**options)


def nearest(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)  # type: ignore[call-overload]
    return f" (did you mean {close[0]!r}?)" if close else ""


Bound = Annotated[float, "largest norm of one example's gradient (C)"]
Momentum = Annotated[float, "heavy-ball momentum of the optimizer"]
Beta = Annotated[float, "share of the fresh gradient in the blend"]
Window = Annotated[int, "window K: the blend sees the K-1 newest past releases"]
Alpha = Annotated[float, "fractional order: (lag+1)^(alpha-1)"]
Lam = Annotated[float, "baseline tempering of old releases (lambda)"]
Tau = Annotated[float, "tempering of releases far from the trend"]
Gamma = Annotated[float, "weight of the newest release in the trend"]
Kappa = Annotated[float, "smallest scale by which distances are divided"]
Zeta = Annotated[str | float, "trend norm at which confidence is one half; auto: the noise's own"]

FO_REFERENCE = "Partohaghighi and Marcia, Deep Learning under Fractional-Order Differential Privacy, arXiv:2605.09890"


@register("dp-sgd", "Abadi et al., Deep Learning with Differential Privacy, CCS 2016")
def dp_sgd(*, clip: Bound = 1.0, momentum: Momentum = 0.0) -> Method:
    """Plain DP-SGD: clip, sum, add noise, step."""
    return Method(name="dp-sgd", clip=Flat(clip), rule=sgd(momentum))


@register("fo-dp-sgd", FO_REFERENCE)
def fo_dp_sgd(
    *,
    clip: Bound = 1.0,
    momentum: Momentum = 0.0,
    beta: Beta = 0.9,
    window: Window = 8,
    alpha: Alpha = 0.8,
    lam: Lam = 0.01,
    tau: Tau = 0.1,
    gamma: Gamma = 0.2,
    kappa: Kappa = 1e-6,
    zeta: Zeta = "auto",
) -> Method:
    """Fractional-order memory: each release blends in past ones by a tempered power law."""
    memory = Blend(_fractional(alpha, lam, tau, gamma, kappa, zeta), beta, window)
    return Method(name="fo-dp-sgd", clip=Flat(clip), memory=memory, rule=sgd(momentum))


@register("post-fm", FO_REFERENCE)
def post_fm(
    *,
    clip: Bound = 1.0,
    momentum: Momentum = 0.0,
    beta: Beta = 0.9,
    window: Window = 8,
    alpha: Alpha = 0.8,
    lam: Lam = 0.01,
    tau: Tau = 0.1,
    gamma: Gamma = 0.2,
    kappa: Kappa = 1e-6,
    zeta: Zeta = "auto",
) -> Method:
    """The same fractional weights over plain DP-SGD releases (Post-FM): a finite filter, not a recursive one."""
    memory = Blend(_fractional(alpha, lam, tau, gamma, kappa, zeta), beta, window, remembers="fresh")
    return Method(name="post-fm", clip=Flat(clip), memory=memory, rule=sgd(momentum))


@register("uniform-memory", FO_REFERENCE)
def uniform_memory(*, clip: Bound = 1.0, momentum: Momentum = 0.0, beta: Beta = 0.9, window: Window = 8) -> Method:
    """Each release blends in the plain mean of the window: the ablation with equal weights."""
    return Method(name="uniform-memory", clip=Flat(clip), memory=Blend(Uniform(), beta, window), rule=sgd(momentum))


@register("exponential-memory", FO_REFERENCE)
def exponential_memory(
    *,
    clip: Bound = 1.0,
    momentum: Momentum = 0.0,
    beta: Beta = 0.9,
    window: Window = 8,
    decay: Annotated[float, "geometric decay of the weights per lag"] = 0.8,
) -> Method:
    """Each release blends in the window with geometric weights: the ablation with short memory."""
    memory = Blend(Exponential(decay), beta, window)
    return Method(name="exponential-memory", clip=Flat(clip), memory=memory, rule=sgd(momentum))


def _fractional(alpha: float, lam: float, tau: float, gamma: float, kappa: float, zeta: str | float) -> Fractional:
    """The paper's letters, in our words."""
    try:
        floor: Any = zeta if zeta == "auto" else float(zeta)
    except ValueError:
        raise ValueError(f"zeta={zeta!r} must be a positive number or 'auto'") from None
    return Fractional(alpha, lam, tau, kappa, floor, gamma)
