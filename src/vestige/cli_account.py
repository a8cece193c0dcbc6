"""What would a plan cost? `vestige account`: priced without training."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vestige.cli_terminal import Json, answers, print_json


def account(
    sample_rate: Annotated[float, typer.Option(help="Probability q that an example joins a step.")],
    steps: Annotated[int, typer.Option("--steps", "--trials", help="Number of steps, or of trials.")],
    delta: Annotated[float, typer.Option(help="Allowed failure probability.")] = 1e-5,
    noise_multiplier: Annotated[float | None, typer.Option(help="Accounted noise multiplier: gives epsilon.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget: gives the noise multiplier.")] = None,
    paper_sigma: Annotated[
        float | None, typer.Option(help="The sigma of a memory method's paper; with --beta, gives epsilon.")
    ] = None,
    beta: Annotated[float, typer.Option(help="Share of the fresh gradient, with --paper-sigma.")] = 1.0,
    groups: Annotated[
        int | None, typer.Option(help="Clipped in this many groups: --paper-sigma is then each group's own.")
    ] = None,
    accountant: Annotated[str, typer.Option(help="pld (tight, what is reported) or rdp (fast).")] = "pld",
    sampling: Annotated[str, typer.Option(help="How batches are drawn; only poisson has a price.")] = "poisson",
    method: Annotated[
        str | None, typer.Option(help="dpsur or dpsgd-br: price trials.", rich_help_panel="Selective methods")
    ] = None,
    accounting_by: Annotated[
        str,
        typer.Option(
            "--accounting",
            help="trial-level: each trial is one question whose reject bit and accepted candidate are public "
            "(dominating pair; dpsgd-br also shows its noisy loss). every-trial: one gradient and one loss question a "
            "trial, charged in full; the fallback. published: accepted updates only, which is refuted and no epsilon.",
            rich_help_panel="Selective methods",
        ),
    ] = "trial-level",
    accepted: Annotated[
        int | None, typer.Option(help="Updates applied, for the published claim.", rich_help_panel="Selective methods")
    ] = None,
    sigma_t: Annotated[
        float | None, typer.Option(help="Noise multiplier of the gradient.", rich_help_panel="Selective methods")
    ] = None,
    validation_rate: Annotated[
        float | None, typer.Option(help="Chance to join a loss test.", rich_help_panel="Selective methods")
    ] = None,
    sigma_v: Annotated[
        float | None, typer.Option(help="Noise multiplier of the loss test.", rich_help_panel="Selective methods")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Accept below this many clip bounds.", rich_help_panel="Selective methods")
    ] = None,
    as_json: Json = False,
) -> None:
    """Price a plan without training: epsilon from noise, or noise from epsilon.

    Examples:

        vestige account --sample-rate 0.04 --noise-multiplier 1.2222 --steps 6250 --delta 1e-5

        vestige account --sample-rate 0.04 --epsilon 3 --steps 6250

        vestige account --sample-rate 0.04 --paper-sigma 1.1 --beta 0.9 --steps 6250

        vestige account --sample-rate 0.04 --paper-sigma 1.1 --beta 0.9 --steps 6250 --groups 21

        vestige account --method dpsur --trials 2914 --accepted 1246 --sample-rate 0.01707 --sigma-t 3 \\
            --validation-rate 0.00427 --sigma-v 1.37 --threshold -1.5 --accounting trial-level
    """
    if method is not None:
        facts = {
            "sample_rate": sample_rate,
            "sigma_t": sigma_t if sigma_t is not None else noise_multiplier,
            "validation_rate": validation_rate,
            "sigma_v": sigma_v,
            "threshold": threshold,
        }
        _account_trials({"method": method, "trials": steps, "delta": delta, **facts}, accepted, accounting_by, as_json)
        return
    from vestige import accounting, limits
    from vestige.questions import SampledGaussian

    limits.check_rate(sample_rate)
    limits.check_steps(steps)
    limits.check_delta(delta)
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant={accountant!r} must be pld or rdp")
    if sampling != "poisson":
        reasons = accounting.guarantee({}, delta, accounting.Facts(sampling=sampling)).reasons
        raise ValueError(f"sampling={sampling!r} has no price: {'; '.join(reasons)}")
    given = [
        name
        for name, value in (("noise-multiplier", noise_multiplier), ("epsilon", epsilon), ("paper-sigma", paper_sigma))
        if value is not None
    ]
    if len(given) != 1:
        raise ValueError(
            "give exactly one of --noise-multiplier, --epsilon and --paper-sigma, not "
            + (" and ".join(f"--{name}" for name in given) or "none")
        )
    if groups is not None and groups < 1:
        raise ValueError(f"groups={groups} must be a whole number from 1 up")
    if not 0 < beta <= 1:
        raise ValueError(f"beta={beta} must lie in (0, 1]")
    if beta != 1 and paper_sigma is None:
        raise ValueError(f"beta={beta} rescales --paper-sigma only: the accounted multiplier already contains it")
    if epsilon is not None:
        noise_multiplier = accounting.calibrate(
            lambda z: {SampledGaussian(sample_rate, z): steps}, epsilon, delta, accountant
        )
    elif paper_sigma is not None:
        noise_multiplier = limits.accounted_multiplier(paper_sigma, beta, groups or 1)
    assert noise_multiplier is not None
    limits.check_multiplier(noise_multiplier)
    history: accounting.History = {SampledGaussian(sample_rate, noise_multiplier): steps}
    spent = accounting.epsilon(history, delta, accountant)
    result = {
        "epsilon": spent,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "accountant": accountant,
        "epsilon_rdp": accounting.epsilon(history, delta, "rdp"),
        "adjacency": "add/remove one example",
        "sampling": "poisson",
    }
    if groups is not None:
        # What one group's ratio of noise to bound would cost if it were the whole release: drawn in papers, but one
        # example is in every group at once, so it bounds nothing.
        marginal: accounting.History = {SampledGaussian(sample_rate, noise_multiplier * groups**0.5): steps}
        result |= {
            "groups": groups,
            "nonguarantee_marginal_epsilon": accounting.epsilon(marginal, delta, accountant),
        }
    if as_json:
        print_json(result)
        return
    answers.print(f"epsilon {spent:.4f} at delta {delta:g} ({accountant}; by Renyi {result['epsilon_rdp']:.4f})")
    answers.print(
        f"noise multiplier {noise_multiplier:.6g}, {steps} steps, Poisson rate {sample_rate:g}, add/remove one example"
    )
    if groups is not None:
        answers.print(
            f"{groups} groups on one sample, priced jointly "
            f"(nonguarantee_marginal_epsilon {result['nonguarantee_marginal_epsilon']:.4f}: no guarantee)"
        )


def _account_trials(facts: dict[str, Any], accepted: int | None, accounting_by: str, as_json: bool) -> None:
    from vestige.trial_prices import Trials, check_selective, price

    check_selective(facts["method"])
    missing = [name for name, value in facts.items() if value is None]
    if missing:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in facts)
        raise ValueError(f"--{missing[0].replace('_', '-')} is missing: {facts['method']} is priced from {words}")
    result = price(Trials(**facts, accepted=accepted), accounting_by)
    if as_json:
        print_json(result)
        return
    if "epsilon" in result:
        answers.print(
            f"epsilon {result['epsilon']:.4f} at delta {result['delta']:g} ({accounting_by}, {result['trials']} "
            f"trials; by Renyi {result['epsilon_rdp']:.4f})"
        )
    if "published_claim_epsilon" in result:
        claim = result["published_claim_epsilon"]
        answers.print(f"published claim {claim:.4f} for {accepted} accepted updates: refuted, not a guarantee")
