"""What will a run cost, before it starts? From a request to a noise multiplier, a learning rate and a budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp, log, sqrt
from typing import Any, Literal

from torch import nn

from vestige import accounting
from vestige.checks import check_delta, check_multiplier, check_number, check_rate, check_steps, renamed
from vestige.layout import Layout
from vestige.methods.base import Method
from vestige.priced_questions import Question, SampledGaussian
from vestige.randomness.noise_schedules import Constant, level
from vestige.randomness.sampling import Poisson, RowsOfUsers, Sampling, sampling_by_name
from vestige.training.automatic_rate import auto_rate, initial_weight_norm
from vestige.units import Users

DEFAULT_STEPS = 200
MOST_STEPS = 10**8
NOTHING_GIVEN = "neither a budget nor noise is given: give epsilon=3, say, or noise_multiplier=1"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user requests: a budget or a noise multiplier, and how many steps. The rest follows."""

    sample_rate: float
    delta: float
    batch_size: int | None = None
    """In the place of the rate, which follows from it once the size of the dataset is known (`paced`)."""
    epochs: int | None = None
    steps: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    lr: float | Literal["auto"] = "auto"
    begun_at: tuple[float, str] | None = None
    """The automatic rate of a resumed run, and the reason that was given for it."""
    sampling: str = "poisson"
    max_batch: int | None = None
    """The most examples that a truncated sample keeps."""
    users: Users | None = None
    """Whose presence is hidden; None: one row's."""
    owners: Any = None
    """The owner of each row, where a step keeps so many rows of one at most."""

    @property
    def left(self) -> float | None:
        """Of the budget, what is left for the run where a bound on users' rows was chosen by a question."""
        chosen = 0.0 if self.users is None else self.users.choice_epsilon
        if self.epsilon is None or not chosen:
            return self.epsilon
        if self.epsilon <= chosen:
            raise ValueError(
                f"epsilon={self.epsilon} is not more than the {chosen:g} that the choice of a bound on users' rows has "
                "cost: give a larger one, or choose the bound by a smaller one"
            )
        return self.epsilon - chosen

    def paced(self, population: int) -> Request:
        """With the rate that `batch_size` is, and the steps that `epochs` are, of so many examples or users."""
        rate, steps = self.sample_rate, self.steps
        if self.batch_size is not None:
            check_steps(self.batch_size, "batch_size")
            if self.batch_size > population:
                raise ValueError(f"batch_size={self.batch_size} is more than the {population} that data hold")
            rate = self.batch_size / population
        if self.epochs is not None and steps is None:
            check_steps(self.epochs, "epochs")
            check_rate(rate)
            steps = self.epochs * max(1, round(1 / rate))
        return replace(self, sample_rate=rate, steps=steps, batch_size=None, epochs=None)


@dataclass(frozen=True)
class Plan:
    """The public facts of a run, all fixed before any data is touched."""

    sample_rate: float
    steps: int
    delta: float
    noise_multiplier: float
    epsilon: float | None
    """The budget; None if only the noise multiplier was given."""
    lr: float
    lr_reason: str
    noise_strategy: str | None = None
    """How the noise is correlated over steps, its number of bands included; None if it is independent."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def sampling_of(method: Method, request: Request, population: int) -> Sampling:
    """How a run draws its samples: as the noise's theorem assumes, or as requested, where that has a theorem too.

    Shuffled batches have none, and train without an epsilon.
    """
    if request.users is not None:
        require_users(method, request.users, request.sampling)
        if request.users.sample == "rows" and request.users.rows_per_user != 1:
            return RowsOfUsers(Poisson(request.sample_rate), request.users, request.owners)
    if request.sampling == "poisson" and request.max_batch is None:
        return method.noise.sampling(request.sample_rate)
    drawn = sampling_by_name(request.sampling, request.sample_rate, population, request.max_batch)
    if request.sampling != "shuffled":
        require_plain(method, request.sampling)
    return drawn


def require_users(method: Method, users: Users, sampling: str) -> None:
    """Refuse what has no theorem for users with several rows."""
    if users.rows_per_user == 1:
        return
    rows, plain = users.sample == "rows", SampledGaussian(0.5, 1.0)
    if rows and sampling != "poisson":
        raise ValueError(
            f"sampling={sampling!r}: of sampled rows, several of which are one user's, only Poisson samples have a "
            "theorem; use sample='users', or sampling='poisson'"
        )
    wrong = {
        "one answer about every example": method.probe.solves,
        "a gate": bool(method.gate.tests) or method.gate.adaptive,
        "correlated noise over sampled rows": rows and method.noise.one_fixed_question,
        "importance sampling, or more than one sample a step,": method.probe.period(0.5) != 1
        or any(method.probe.questions(0.5, 1.0, step) != (plain,) for step in range(2)),
    }
    for part, there in wrong.items():
        if there:
            raise ValueError(
                f"users: {part} has no theorem for users with several rows here, and {method.name} has that; use "
                + ("sample='users', or another method" if part.startswith("correlated") else "another method")
            )


def require_plain(method: Method, sampling: str) -> None:
    """Refuse what has a theorem for Poisson samples only."""
    plain = SampledGaussian(0.5, 1.0)
    wrong = {
        "correlated noise": method.noise.one_fixed_question,
        "a gate": bool(method.gate.tests) or method.gate.adaptive,
        "an adaptive clip": method.clip.adaptive,
        "a noise schedule": method.schedule != Constant(),
        "importance sampling, or more than one sample a step,": method.probe.period(0.5) != 1
        or any(method.probe.questions(0.5, 1.0, step) != (plain,) for step in range(2)),
    }
    for part, there in wrong.items():
        if there:
            raise ValueError(
                f"sampling={sampling!r}: {part} has no theorem under it, and {method.name} has that; use Poisson "
                "samples, or another method"
            )


def questions(
    method: Method,
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    first: tuple[Question, ...] = (),
    sampling: Sampling | None = None,
) -> dict[Question, int]:
    """The questions of a whole run, `first` before its steps, each with its count. `sampling` says what they are where
    samples are not Poisson ones: of an epoch that is asked as a whole, every step that was begun costs the whole."""
    period = method.probe.period(sample_rate)
    kinds: Counter[tuple[float, int]] = Counter()
    if method.schedule == Constant():
        kinds.update({(noise_multiplier, phase): -(-(steps - phase) // period) for phase in range(min(period, steps))})
    else:
        for step in range(steps):
            kinds[level(method.schedule, noise_multiplier, step, sample_rate), step % period] += 1
    history: Counter[Question] = Counter(first)
    for (multiplier, phase), count in kinds.items():
        for question in method.gate.questions(method.questions(sample_rate, multiplier, phase)):
            if sampling is None:
                history[question] += count
            else:
                history[sampling.question(question)] += -(-count // sampling.period)
    return history


def settled(method: Method, request: Request) -> Method:
    """The method with what its noise leaves to the rate, the length and the budget of a run, all of them public.

    Without a budget the epsilon that counts is what independent noise of the given multiplier would cost.
    """
    length = DEFAULT_STEPS if request.steps is None else request.steps

    def budget() -> float:
        check_request(request)
        check_steps(length)
        if request.epsilon is None and request.noise_multiplier is None:
            raise ValueError(NOTHING_GIVEN)
        if request.epsilon is None:
            assert request.noise_multiplier is not None
            check_multiplier(request.noise_multiplier)
            question = SampledGaussian(request.sample_rate, request.noise_multiplier)
            return accounting.epsilon({question: length}, request.delta)
        if request.noise_multiplier is not None and request.steps is None:
            raise ValueError(
                "bands='auto' follows from the number of steps, and without steps= they would follow from the bands: "
                "give steps, or bands"
            )
        assert request.left is not None
        return request.left

    return replace(method, noise=method.noise.settled(request.sample_rate, length, budget))


def check_request(request: Request) -> None:
    for name in ("sample_rate", "delta", "epsilon", "noise_multiplier", "lr"):
        value = getattr(request, name)
        if name == "lr" and value is None:
            raise ValueError("lr=None: give a number, or 'auto'")
        if value is not None and (name, value) != ("lr", "auto"):
            check_number(name, value, finite=name == "lr")
    check_rate(request.sample_rate)
    check_delta(request.delta)


def plan(
    model: nn.Module,
    layout: Layout,
    method: Method,
    population: int,
    request: Request,
    first: tuple[Question, ...] = (),
) -> Plan:
    """Calibrate the noise to the budget (or take it as given), then choose the learning rate.

    `first` are questions before the first step. Where noise and budget are both given and the steps are not, as many
    steps are planned as the budget affords.
    """
    steps, delta, epsilon = request.steps, request.delta, request.left
    check_request(request)
    check_delta(delta, population)
    if method.probe.solves:
        check_one_answer(method, request)
        steps = 1
    sampling = sampling_of(method, request, population)
    rate = sampling.rate if request.sampling == "allocation" else request.sample_rate
    noise_multiplier = _one_noise(request.noise_multiplier, method.noise_multiplier)
    with renamed(method.origin.letters):
        accountant = check_schedule(method, epsilon)
        if steps is None:
            steps = -(-DEFAULT_STEPS // sampling.period) * sampling.period
            if epsilon is not None and noise_multiplier is not None:
                check_multiplier(noise_multiplier)
                once = questions(method, rate, noise_multiplier, 1, sampling=sampling)
                steps = sampling.period * affordable(once, epsilon, delta, accountant, first)
        check_steps(steps)
        if epsilon is None and noise_multiplier is None:
            raise ValueError(NOTHING_GIVEN)
        if noise_multiplier is None:
            assert epsilon is not None
            history_at = partial(questions, method, rate, steps=steps, first=first, sampling=sampling)
            noise_multiplier = accounting.calibrate(history_at, epsilon, delta, accountant)
        check_multiplier(noise_multiplier)
        method.clip.now(method.clip.init()).gradient_multiplier(noise_multiplier, rate * population)
    lr, reason = request.begun_at or choose_rate(
        model, layout, method, population, rate, noise_multiplier, steps, request.lr
    )
    strategy = repr(method.noise) if method.noise.one_fixed_question else None
    return Plan(rate, steps, delta, noise_multiplier, request.epsilon, lr, reason, strategy)


def check_one_answer(method: Method, request: Request) -> None:
    """Refuse what a method that solves by one answer about every example does not do."""
    for name, usual in (("sample_rate", (1,)), ("steps", (None, 1)), ("lr", ("auto", 1)), ("sampling", ("poisson",))):
        value = getattr(request, name)
        if value not in usual:
            raise ValueError(
                f"{name}={value!r}: {method.name} asks once, about every example, and solves for the weights; give "
                f"{name}={usual[-1]!r}"
            )
    if request.max_batch is not None:
        raise ValueError(f"max_batch={request.max_batch}: {method.name} asks about every example; leave it out")


def _one_noise(asked: float | None, own: float | None) -> float | None:
    if asked is not None and own is not None and asked != own:
        raise ValueError(f"noise_multiplier={asked} and the method's own sigma {own}: give one of them")
    return asked if asked is not None else own


def check_schedule(method: Method, epsilon: float | None) -> str:
    """The accountant that may price the plan: PLD, or Renyi where questions follow from earlier answers."""
    if not method.gate.adaptive:
        return "pld"
    if epsilon is None:
        raise ValueError(
            "epsilon=None: this method's noise follows from earlier answers, and only a filter that knows the budget "
            "in advance bounds that; give epsilon=3, say, or progress='none'"
        )
    return "rdp"


def affordable(
    step: accounting.History,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    first: tuple[Question, ...] = (),
) -> int:
    """The largest number of steps that cost at most epsilon with what is asked first; ValueError if one costs more."""

    def cost(steps: int) -> float:
        history = Counter(first)
        history.update({question: count * steps for question, count in step.items()})
        return accounting.epsilon(history, delta, accountant)

    known = {1: cost(1)}
    if known[1] > epsilon:
        raise ValueError(f"epsilon={epsilon} does not pay for a single step; allow more, or ask with more noise")
    low, high = 1, MOST_STEPS
    while high - low > 1:
        # Prices grow about as the square root of the steps. Every third guess bisects, so that the search ends soon.
        guess = round(_power_law(known, epsilon)) if len(known) % 3 else round((low * high) ** 0.5)
        guess = low + 1 if guess == low else high - 1 if guess == high else guess  # the neighbour settles it
        middle = guess if low < guess < high else (low + high) // 2 if high < MOST_STEPS else 2 * low
        known[middle] = cost(middle)
        low, high = (middle, high) if known[middle] <= epsilon else (low, middle)
    return low


def _power_law(known: dict[int, float], epsilon: float) -> float:
    """Where a power law through the two known prices nearest to epsilon meets it."""
    near = sorted((item for item in known.items() if item[1] > 0), key=lambda item: abs(item[1] - epsilon))[:2]
    if not near:
        return 2.0 * max(known)
    (x0, y0), (x1, y1) = near if len(near) == 2 else (near[0], near[0])
    slope = log(y1 / y0) / log(x1 / x0) if y0 != y1 else 0.5
    return x0 * exp(min(log(epsilon / y0) / max(slope, 0.1), 20.0))


def choose_rate(
    model: nn.Module,
    layout: Layout,
    method: Method,
    population: int,
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    lr: float | Literal["auto"],
) -> tuple[float, str]:
    """The learning rate and the reason for it."""
    if method.probe.solves:
        return 1.0, f"lr 1: {method.name} solves for the weights"
    if lr != "auto":
        if not lr > 0:
            raise ValueError(f"lr={lr} must be positive, or 'auto'")
        return float(lr), "lr: as given"
    gain = method.rule.gain
    if gain is None:
        raise ValueError(f"lr='auto' has no rule for the optimizer {method.rule.name}; give lr a number")
    sensitivity = method.clip.sensitivity(layout)
    expected_batch = sample_rate * population
    per_unit = sensitivity * layout.size**0.5 if isinstance(sensitivity, int | float) else float(sensitivity.norm())
    chosen = auto_rate(
        weight_norm=initial_weight_norm(model, layout),
        noise_norm=noise_multiplier * per_unit / expected_batch,
        size=layout.size,
        walk=noise_walk(method, sample_rate, steps),
        steps=steps,
        gain=gain if method.rule.scale_free else gain * method.memory.steady_gain,
        scale_free=method.rule.scale_free,
        balanced=method.balance is not None,
    )
    if not chosen.lr < LARGEST_RATE:
        raise ValueError(f"lr='auto' is {chosen.lr:.3g} here, which float32 cannot hold: give lr a number")
    return chosen.lr, str(chosen)


LARGEST_RATE = 1e30


def noise_walk(method: Method, sample_rate: float, steps: int) -> float:
    """How far unit noise moves the sum of a run's releases: sqrt(steps), unless it is scheduled or correlated."""
    walk = method.noise.walk(sample_rate, steps)
    if method.schedule == Constant():
        return walk
    return walk * sqrt(sum(level(method.schedule, 1.0, step, sample_rate) ** 2 for step in range(steps)) / steps)


def paper_groups(method: Method, layout: Layout) -> int:
    """How many groups share the sigma of a paper; refused where the groups' own ratios differ, or those of steps."""
    final = getattr(method.memory, "final_weight", None)
    if final is not None:
        raise ValueError(
            f"paper_sigma: with beta_end={final} every step has its own ratio of noise to the fresh sum, and a paper's "
            "sigma is one number; give noise_multiplier or epsilon"
        )
    ratios = method.clip.noise_ratios(layout)
    if not bool(((ratios / ratios[0] - 1).abs() < 1e-9).all()):
        raise ValueError(
            f"paper_sigma: with {method.clip} every group has its own ratio of noise to bound, and a paper's sigma is "
            "one number; give noise_multiplier or epsilon"
        )
    return len(ratios)
