"""Which method has this name? Every file of `methods` registers its own; importing the package registers them all."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal

from vestige import layerwise_scaling as balances
from vestige.checks import python_number, renamed
from vestige.mechanism.groups import named_grouping
from vestige.methods.base import Method, Origin, by_group
from vestige.optim import rules
from vestige.renaming import CLIP, current

PrivacyClass = Literal["post-processing", "extra release", "selection", "correlated noise"]
ONE_SUM = "one noised sum of clipped gradients per step"
DP_SGD_PRICE = "T x SGM(q, z): the price of DP-SGD"


@dataclass(frozen=True)
class Neutral:
    """A setting at which a method must equal another one, bit for bit."""

    options: dict[str, Any]
    like: str = "dp-sgd"
    like_options: dict[str, object] = field(default_factory=dict)
    optimizer: str | None = None
    """The torch optimizer to give the other method, where the two have different ones."""
    groups: str | None = None
    """The groups by which the other method must clip, where this one clips by group."""
    norms: str | None = None
    """The groups whose norms the other method must add up, where this one does: the last bits depend on it."""
    sample_rate: float | None = None
    """The sampling rate at which they are equal; None: at any."""


@dataclass(frozen=True)
class Entry:
    """A named method: how to make it, and what a reader should know."""

    name: str
    make: Callable[..., Method]
    reference: str
    cite: str
    """The key of its paper in `data/references.bib`."""
    privacy_class: PrivacyClass
    releases: str
    price: str
    neutral: Neutral | None
    aliases: tuple[str, ...]

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.make, eval_str=True).parameters)

    @property
    def defaults(self) -> dict[str, object]:
        return {name: option.default for name, option in self.options.items()}

    @property
    def parts(self) -> dict[str, object]:
        """The parts of the method, at its defaults, that differ from plain DP-SGD's."""
        return self.make().parts(Method())

    @property
    def description(self) -> str:
        """The whole docstring of the method."""
        return inspect.cleandoc(self.make.__doc__ or "")

    @property
    def summary(self) -> str:
        return self.description.split("\n")[0]


METHODS: dict[str, Entry] = {}
SOLVERS: dict[str, Entry] = {}
"""Methods that solve for a model by one answer. They are found by name, as recipes do; methods that descend, which are
compared with one another and share their laws, are in `METHODS`."""
ALIASES: dict[str, str] = {}
"""Other names that papers use for a registered method."""


def register(
    reference: str,
    cite: str,
    privacy_class: PrivacyClass = "post-processing",
    *,
    letters: Mapping[str, str] | None = None,
    releases: str = ONE_SUM,
    price: str = DP_SGD_PRICE,
    neutral: Neutral | None = None,
    aliases: tuple[str, ...] = (),
    solver: bool = False,
) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Register a function that makes a method, under the function's own name: dp_sgd is dp-sgd.

    `letters` maps fields of the method's parts to its options, which errors name instead.
    """

    def add(make: Callable[..., Method]) -> Callable[..., Method]:
        name = make.__name__.replace("_", "-")
        known = {"bound": "max_grad_norm", **(letters or {})}
        signature = inspect.signature(make)

        @wraps(make)
        def named(**options: object) -> Method:
            options = {name: python_number(value) for name, value in current(options, CLIP).items()}
            chosen = signature.bind(**options)
            chosen.apply_defaults()
            with renamed(known):
                made = replace(make(**options), name=name)
            return replace(made, origin=Origin(_flat(chosen.arguments), known, made))

        (SOLVERS if solver else METHODS)[name] = Entry(
            name, named, reference, cite, privacy_class, releases, price, neutral, aliases
        )
        ALIASES.update(dict.fromkeys(aliases, name))
        return named

    return add


WRITTEN = {"max_grad_norm": "clip"}
"""What ledgers and run folders call an option: they keep the name that they began with."""


def _flat(arguments: Mapping[str, Any]) -> dict[str, object]:
    """Options as they are written down, including those that a function passes on (`options_of`)."""
    rest = arguments.get("options", {})
    return as_written({**{name: value for name, value in arguments.items() if name != "options"}, **rest})


def as_written(options: Mapping[str, object]) -> dict[str, object]:
    """Options by the names that records have for them."""
    return {WRITTEN.get(name, name): value for name, value in options.items()}


def as_given(written: Mapping[str, object]) -> dict[str, Any]:
    """Options that were written down, by the names that methods take them by."""
    names = {old: new for new, old in WRITTEN.items()}
    return {names.get(name, name): value for name, value in written.items()}


def options_of(
    other: Callable[..., Method], **defaults: object
) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Declare that a function takes the options of another, some of them with other defaults, and passes them on."""

    def declare(make: Callable[..., Method]) -> Callable[..., Method]:
        known = inspect.signature(other, eval_str=True)
        changed = [each.replace(default=defaults.get(name, each.default)) for name, each in known.parameters.items()]
        make.__signature__ = known.replace(parameters=changed)  # type: ignore[attr-defined]
        return make

    return declare


def make_method(
    name: str,
    *,
    groups: str | None = None,
    balance: str | None = None,
    optimizer: str | None = None,
    **options: object,
) -> Method:
    """A method by name, with its options; an unknown name or option is refused with the nearest known one.

    Any method may clip by groups of parameters instead: `groups` is layers, flat, or patterns; any may balance its
    steps: `balance` is relative, or plain; and any may move by another `optimizer`: sgd, adam and the like.

    >>> import vestige
    >>> vestige.make_method("fo-dp-sgd", beta=0.8).memory.fresh_weight
    0.8
    >>> vestige.make_method("dp-sgd", groups="layers").grouping
    Layers()
    """
    entry, options = find(name), current(options, CLIP)
    unknown = [key for key in options if key not in entry.options]
    if unknown:
        known = ", ".join((*entry.options, "groups", "balance", "optimizer"))
        raise ValueError(f"{unknown[0]}={options[unknown[0]]} is not an option of {name}; its options are {known}")
    method = entry.make(**options)
    if optimizer is not None:
        method = moved_by(method, optimizer, options)
    if balance is not None:
        method = replace(method, balance=balances.named(balance))
    return method if groups is None else by_group(method, named_grouping(groups))


def moved_by(method: Method, optimizer: str, options: Mapping[str, object]) -> Method:
    """The method with another optimizer; `options` are those that it was made with."""
    if optimizer.lower() == "sgd":
        return replace(method, rule=rules.named(optimizer, method.rule.options))
    if "momentum" in options:
        raise ValueError(f"momentum={options['momentum']} belongs to sgd, not to the optimizer {optimizer}")
    return replace(method, rule=rules.named(optimizer, {}))


def find(name: str) -> Entry:
    known = ALIASES.get(name, name)
    if known in SOLVERS:
        return SOLVERS[known]
    if known not in METHODS:
        raise ValueError(f"method={name!r} is unknown{nearest(name, METHODS)}; choose from {', '.join(METHODS)}")
    return METHODS[known]


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
