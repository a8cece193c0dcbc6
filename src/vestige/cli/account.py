"""What would a plan cost? `vestige account` prices it without training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vestige.assumptions import ADJACENCY, PRICE_ALONE
from vestige.cli.dataclass_flags import with_flags
from vestige.cli.errors import refuse_others
from vestige.cli.terminal import Json, meant, print_json, stdout
from vestige.units import Users

if TYPE_CHECKING:
    from vestige.priced_questions import Question

ALWAYS = ("sample_rate", "steps", "delta", "as_json")
EPOCHS = ("epochs", "steps_per_epoch")
TRUNCATED = ("max_batch", "examples")
USERS = ("unit", "rows_per_user", "cap", "sample")
GAUSSIAN = (
    "noise_multiplier",
    "epsilon",
    "paper_sigma",
    "beta",
    "groups",
    "accountant",
    "sampling",
    *EPOCHS,
    *TRUNCATED,
    *USERS,
)
TRIALS = ("method", "accounting_by", "accepted", "sigma_t", "validation_rate", "sigma_v", "threshold")


@dataclass(frozen=True, kw_only=True)
class AccountFlags:
    """The flags of `vestige account`."""

    sample_rate: Annotated[float | None, typer.Option(help="Probability q that an example joins a step.")] = None
    steps: Annotated[int | None, typer.Option("--steps", "--trials", help="Number of steps, or of trials.")] = None
    epochs: Annotated[
        int | None, typer.Option(help="Epochs, with --steps-per-epoch: instead of --sample-rate and --steps.")
    ] = None
    steps_per_epoch: Annotated[int | None, typer.Option(help="Steps of an epoch: the rate is one over it.")] = None
    delta: Annotated[float, typer.Option(help="Allowed failure probability.")] = 1e-5
    noise_multiplier: Annotated[float | None, typer.Option(help="Accounted noise multiplier: gives epsilon.")] = None
    epsilon: Annotated[float | None, typer.Option(help="Budget: gives the noise multiplier.")] = None
    paper_sigma: Annotated[
        float | None, typer.Option(help="The sigma of a memory method's paper; with --beta, gives epsilon.")
    ] = None
    beta: Annotated[float, typer.Option(help="Share of the fresh gradient, with --paper-sigma.")] = 1.0
    groups: Annotated[
        int | None, typer.Option(help="Clipped in this many groups: --paper-sigma is then each group's own.")
    ] = None
    accountant: Annotated[str, typer.Option(help="pld (tight, what is reported) or rdp (fast).")] = "pld"
    sampling: Annotated[
        str,
        typer.Option(
            help="poisson (a toss for each example and step), allocation (each example in one step of every epoch, "
            "drawn uniformly) or truncated (poisson, at most --max-batch of --examples kept). Others have no price."
        ),
    ] = "poisson"
    max_batch: Annotated[int | None, typer.Option(help="Most examples that a truncated sample keeps.")] = None
    examples: Annotated[
        int | None, typer.Option(help="Size of the dataset, for truncated samples; with --sample users, users.")
    ] = None
    unit: Annotated[
        str, typer.Option(help="Whose presence is hidden: row, or user (all rows of one).", rich_help_panel="Users")
    ] = "row"
    rows_per_user: Annotated[
        int | None, typer.Option(help="The most rows that one user has.", rich_help_panel="Users")
    ] = None
    cap: Annotated[
        int | None, typer.Option(help="The most rows of one user that a step keeps.", rich_help_panel="Users")
    ] = None
    sample: Annotated[
        str,
        typer.Option(
            help="rows: each row joins and is clipped by itself. users: each user joins with --sample-rate, and the "
            "mean of up to --cap rows is clipped once.",
            rich_help_panel="Users",
        ),
    ] = "rows"
    method: Annotated[
        str | None, typer.Option(help="dpsur or dpsgd-br: price trials.", rich_help_panel="Selective methods")
    ] = None
    accounting_by: Annotated[
        str,
        typer.Option(
            "--accounting",
            help="trial-level: each trial is one question whose reject bit and accepted candidate are public "
            "(dominating pair; dpsgd-br also shows its noisy loss). every-trial: one gradient and one loss question a "
            "trial, charged in full; the fallback. published: accepted updates only, which is refuted and no epsilon.",
            rich_help_panel="Selective methods",
        ),
    ] = "trial-level"
    accepted: Annotated[
        int | None, typer.Option(help="Updates applied, for the published claim.", rich_help_panel="Selective methods")
    ] = None
    sigma_t: Annotated[
        float | None, typer.Option(help="Noise multiplier of the gradient.", rich_help_panel="Selective methods")
    ] = None
    validation_rate: Annotated[
        float | None, typer.Option(help="Chance to join a loss test.", rich_help_panel="Selective methods")
    ] = None
    sigma_v: Annotated[
        float | None, typer.Option(help="Noise multiplier of the loss test.", rich_help_panel="Selective methods")
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="Accept below this many clip bounds.", rich_help_panel="Selective methods")
    ] = None
    as_json: Json = False


@with_flags(AccountFlags)
def account(context: typer.Context, flags: AccountFlags) -> None:
    """Price a plan without training: epsilon from noise, or noise from epsilon.

    Examples:

        vestige account --sample-rate 0.04 --noise-multiplier 1.2222 --steps 6250 --delta 1e-5

        vestige account --sample-rate 0.04 --epsilon 3 --steps 6250

        vestige account --sample-rate 0.04 --paper-sigma 1.1 --beta 0.9 --steps 6250

        vestige account --sample-rate 0.04 --paper-sigma 1.1 --beta 0.9 --steps 6250 --groups 21

        vestige account --sampling allocation --epochs 3 --steps-per-epoch 98 --noise-multiplier 0.5155

        vestige account --sampling truncated --max-batch 700 --examples 50000 --sample-rate 0.01 --epsilon 3 --steps 500

        vestige account --unit user --rows-per-user 4 --sample-rate 0.01 --noise-multiplier 2 --steps 1000

        vestige account --unit user --sample users --sample-rate 0.01 --epsilon 3 --steps 1000

        vestige account --method dpsur --trials 2914 --accepted 1246 --sample-rate 0.01707 --sigma-t 3 \\
            --validation-rate 0.00427 --sigma-v 1.37 --threshold -1.5 --accounting trial-level
    """
    if flags.method is not None:
        from vestige.accounting.selective import check_selective

        check_selective(flags.method)
        if flags.sample_rate is None or flags.steps is None:
            raise ValueError(
                f"{'sample_rate' if flags.sample_rate is None else 'trials'}=None: {flags.method} is priced by trials"
            )
        allowed = (*ALWAYS, *TRIALS) if flags.sigma_t is not None else (*ALWAYS, *TRIALS, "noise_multiplier")
        refuse_others(context, allowed, f"{flags.method} is priced trial by trial; its noise is --sigma-t")
        noise = flags.sigma_t if flags.sigma_t is not None else flags.noise_multiplier
        facts = {
            "method": flags.method,
            "trials": flags.steps,
            "delta": flags.delta,
            "sample_rate": flags.sample_rate,
            "sigma_t": noise,
        }
        facts |= {"validation_rate": flags.validation_rate, "sigma_v": flags.sigma_v, "threshold": flags.threshold}
        result = _price_trials(facts, flags.accepted, flags.accounting_by)
        print_json(result) if flags.as_json else _print_trials(result)
        return
    refuse_others(context, (*ALWAYS, *GAUSSIAN), "it belongs to the trials of a selective method; give --method, too")
    _check_one_of(noise_multiplier=flags.noise_multiplier, epsilon=flags.epsilon, paper_sigma=flags.paper_sigma)
    if flags.beta != 1 and flags.paper_sigma is None:
        raise ValueError(f"beta={flags.beta} rescales --paper-sigma only: the accounted multiplier already contains it")
    pace = _pace(flags.sampling, flags.sample_rate, flags.steps, flags.epochs, flags.steps_per_epoch)
    drawn = Drawing(
        flags.sampling,
        *pace,
        flags.max_batch,
        flags.examples,
        _users(flags.unit, flags.sample, flags.rows_per_user, flags.cap),
    )
    plan = StepPlan(
        drawn,
        flags.delta,
        flags.noise_multiplier,
        flags.epsilon,
        flags.paper_sigma,
        flags.beta,
        flags.groups,
        flags.accountant,
    )
    result = _price_steps(plan)
    print_json(result) if flags.as_json else _print_steps(result)


def _check_one_of(**choices: float | None) -> None:
    flags = {f"--{name.replace('_', '-')}": value is not None for name, value in choices.items()}
    given = [flag for flag, there in flags.items() if there]
    if len(given) != 1:
        *others, last = flags
        raise ValueError(f"give exactly one of {', '.join(others)} and {last}, not {' and '.join(given) or 'none'}")


def _pace(
    sampling: str, sample_rate: float | None, steps: int | None, epochs: int | None, steps_per_epoch: int | None
) -> tuple[float, int, int]:
    """The rate, the number of steps, and the steps of an epoch."""
    from vestige.checks import check_steps

    if epochs is None and steps_per_epoch is None and sampling != "allocation":
        if sample_rate is None or steps is None:
            raise ValueError("give --sample-rate and --steps, or --epochs and --steps-per-epoch")
        return sample_rate, steps, 1
    if epochs is None or steps_per_epoch is None or sample_rate is not None or steps is not None:
        raise ValueError("give --epochs and --steps-per-epoch, both of them, and neither --sample-rate nor --steps")
    check_steps(epochs, "epochs")
    check_steps(steps_per_epoch, "steps_per_epoch")
    return 1 / steps_per_epoch, epochs * steps_per_epoch, steps_per_epoch


def _users(unit: str, sample: str, rows_per_user: int | None, cap: int | None) -> Users | None:
    if unit == "user":
        return Users(sample=sample, rows_per_user=rows_per_user, cap=cap)
    if unit != "row":
        raise ValueError(f"unit={unit!r} is unknown; choose from row, user")
    for name, value, usual in (("rows_per_user", rows_per_user, None), ("cap", cap, None), ("sample", sample, "rows")):
        if value != usual:
            raise ValueError(f"{name}={value} belongs to --unit user")
    return None


@dataclass(frozen=True)
class Drawing:
    """How examples are drawn, as given by the flags."""

    sampling: str
    sample_rate: float
    steps: int
    steps_per_epoch: int
    max_batch: int | None
    examples: int | None
    users: Users | None

    @property
    def by_group(self) -> bool:
        """Whether only group privacy of a row's curve is known: rows are sampled, and not by Poisson's tosses."""
        several = self.users is not None and self.users.sample == "rows" and self.users.rows_per_user != 1
        return several and self.sampling != "poisson"

    @property
    def adjacency(self) -> str:
        return ADJACENCY if self.users is None else self.users.adjacency

    def asked(self, multiplier: float) -> dict[Question, int]:
        """The questions of the plan, each with its count."""
        from vestige.priced_questions import AllocatedGaussian, SampledGaussian, TruncatedGaussian

        if self.sampling == "allocation":
            return {AllocatedGaussian(self.steps_per_epoch, multiplier): self.steps // self.steps_per_epoch}
        if self.sampling == "truncated":
            assert self.max_batch is not None
            assert self.examples is not None
            return {TruncatedGaussian(self.sample_rate, multiplier, self.max_batch, self.examples): self.steps}
        plain = SampledGaussian(self.sample_rate, multiplier)
        if self.users is None or self.users.sample == "users":
            return {plain: self.steps}
        of_user = self.users.question(plain)
        assert of_user is not None, "sampled rows have a price for a user"
        return {of_user: self.steps}

    def epsilon(self, multiplier: float, delta: float, accountant: str) -> float:
        from vestige import accounting

        if not self.by_group:
            return accounting.epsilon(self.asked(multiplier), delta, accountant)
        assert self.users is not None
        assert self.users.rows_per_user is not None
        return accounting.group_epsilon(self.asked(multiplier), delta, self.users.rows_per_user)

    def check(self) -> None:
        from vestige import accounting, checks
        from vestige.priced_questions import require_countable

        checks.check_rate(self.sample_rate)
        checks.check_steps(self.steps)
        if self.sampling not in ("poisson", "allocation", "truncated"):
            reasons = accounting.guarantee({}, 0.5, accounting.Facts(sampling=self.sampling)).reasons
            raise ValueError(f"sampling={self.sampling!r} has no price: {'; '.join(reasons)}")
        needed = {"max_batch": self.max_batch, "examples": self.examples}
        for name, value in needed.items():
            flag = f"--{name.replace('_', '-')}"
            if self.sampling == "truncated":
                if value is None:
                    raise ValueError(f"{name}=None: truncated sampling is priced from {flag}")
                checks.check_steps(value, name)
                require_countable(name, value)
            elif value is not None:
                raise ValueError(f"{name}={value} belongs to --sampling truncated")
        if self.by_group and self.users is not None and self.users.cap is not None:
            raise ValueError(
                f"cap={self.users.cap} with --sampling {self.sampling}: a capped sample of rows has a theorem for "
                "Poisson samples only; leave one of them out, or use --sample users"
            )


@dataclass(frozen=True)
class StepPlan:
    """A number of Gaussian steps on samples, as given by the flags."""

    drawn: Drawing
    delta: float
    noise_multiplier: float | None
    epsilon: float | None
    paper_sigma: float | None
    beta: float
    groups: int | None
    accountant: str


def _price_steps(plan: StepPlan) -> dict[str, object]:
    from vestige import accounting, checks

    delta, accountant, groups = plan.delta, plan.accountant, plan.groups
    plan.drawn.check()
    checks.check_delta(delta)
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant={accountant!r} must be pld or rdp")
    if groups is not None:
        checks.check_steps(groups, "groups")
    if not 0 < plan.beta <= 1:
        raise ValueError(f"beta={plan.beta} must lie in (0, 1]")

    asked = plan.drawn.asked
    multiplier = plan.noise_multiplier
    if plan.drawn.by_group and (plan.epsilon is not None or accountant == "rdp"):
        what = "--epsilon" if plan.epsilon is not None else "--accountant rdp"
        raise ValueError(
            f"{what} with --sampling {plan.drawn.sampling}: for a user with several sampled rows only group privacy of "
            "a row's curve is known here; give --noise-multiplier, or use --sample users or --sampling poisson"
        )
    if plan.epsilon is not None:
        multiplier = accounting.calibrate(asked, plan.epsilon, delta, accountant)
    elif plan.paper_sigma is not None:
        multiplier = checks.accounted_multiplier(plan.paper_sigma, plan.beta, groups or 1)
    assert multiplier is not None
    checks.check_multiplier(multiplier)
    found = plan.drawn.epsilon(multiplier, delta, accountant)
    if found == inf:
        raise ValueError(f"noise_multiplier={multiplier}: group privacy gives no finite epsilon; more noise does")
    by_group = plan.drawn.by_group
    users = plan.drawn.users
    result: dict[str, object] = {
        "epsilon": found,
        "delta": delta,
        "noise_multiplier": multiplier,
        "sample_rate": plan.drawn.sample_rate,
        "steps": plan.drawn.steps,
        "accountant": "group privacy" if by_group else accountant,
        "epsilon_rdp": None if by_group else accounting.epsilon(asked(multiplier), delta, "rdp"),
        "adjacency": plan.drawn.adjacency,
        "sampling": plan.drawn.sampling,
        "unit": "row" if users is None else "user",
        **({} if by_group else asdict(accounting.meaning(asked(multiplier), delta))),
        "assumptions": list(PRICE_ALONE),
    }
    if users is not None:
        result |= {"sample": users.sample, "rows_per_user": users.rows_per_user, "cap": users.cap}
    if plan.drawn.sampling == "allocation":
        epoch = plan.drawn.steps_per_epoch
        result |= {"epochs": plan.drawn.steps // epoch, "steps_per_epoch": epoch}
    if plan.drawn.sampling == "truncated":
        result |= {"max_batch": plan.drawn.max_batch, "examples": plan.drawn.examples}
    if groups is not None:
        # The epsilon of one group as if it were the whole release. Papers plot it, but an example contributes to every
        # group at once, so it is no guarantee.
        marginal = plan.drawn.epsilon(multiplier * groups**0.5, delta, accountant)
        result |= {"groups": groups, "nonguarantee_marginal_epsilon": marginal}
    return result


def _print_steps(result: dict[str, object]) -> None:
    by_renyi = "" if result["epsilon_rdp"] is None else f"; by Renyi {result['epsilon_rdp']:.4f}"
    stdout.print(
        f"epsilon {result['epsilon']:.4f} at delta {result['delta']:g} ({result['accountant']}{by_renyi})", markup=False
    )
    stdout.print(
        f"noise multiplier {result['noise_multiplier']:.6g}, {result['steps']} steps, {_drawn(result)}, "
        f"{result['adjacency']}",
        markup=False,
    )
    print_meaning(result)
    if "groups" in result:
        stdout.print(
            f"{result['groups']} groups on one sample, priced jointly "
            f"(nonguarantee_marginal_epsilon {result['nonguarantee_marginal_epsilon']:.4f}: no guarantee)"
        )


def _drawn(result: dict[str, object]) -> str:
    if result["unit"] == "user" and result["sample"] == "users":
        rows = "all its rows" if result["cap"] is None else f"up to {result['cap']} of its rows"
        return f"{_drawn(result | {'unit': 'row'})} of users, the mean of {rows} clipped once"
    if result["unit"] == "user":
        most = "" if result["cap"] is None else f", at most {result['cap']} rows of a user a step"
        return f"{_drawn(result | {'unit': 'row'})} of rows{most}"
    if result["sampling"] == "allocation":
        return f"each example in one of {result['steps_per_epoch']} steps of each of {result['epochs']} epochs"
    most = f", at most {result['max_batch']} of {result['examples']} kept" if result["sampling"] == "truncated" else ""
    return f"Poisson rate {result['sample_rate']:g}{most}"


def print_meaning(result: dict[str, object]) -> None:
    """What an epsilon means, in words: upper bounds on any attacker, and the epsilon of replacing an example."""
    for line in meant(result, "user" if result.get("unit") == "user" else "example"):
        stdout.print(line, markup=False)
    stdout.print(
        f"it rests on {len(PRICE_ALONE)} assumptions, of which a run checks most: --json, or docs/privacy.md",
        markup=False,
    )


def _price_trials(facts: dict[str, Any], accepted: int | None, accounting_by: str) -> dict[str, object]:
    from vestige.accounting.selective import Trials, check_selective, price

    check_selective(facts["method"])
    missing = [name for name, value in facts.items() if value is None]
    if missing:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in facts)
        raise ValueError(f"--{missing[0].replace('_', '-')} is missing: {facts['method']} is priced from {words}")
    return price(Trials(**facts, accepted=accepted), accounting_by)


def _print_trials(result: dict[str, object]) -> None:
    if "epsilon" in result:
        stdout.print(
            f"epsilon {result['epsilon']:.4f} at delta {result['delta']:g} ({result['accounting']}, "
            f"{result['trials']} trials; by Renyi {result['epsilon_rdp']:.4f})"
        )
        print_meaning(result)
    if "published_claim_epsilon" in result:
        claim, accepted = result["published_claim_epsilon"], result["accepted"]
        stdout.print(f"published claim {claim:.4f} for {accepted} accepted updates: refuted, not a guarantee")
