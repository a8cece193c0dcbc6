"""How much does a run give away, measured? `vestige audit` attacks runs and bounds epsilon from below."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vestige.cli.dataclass_flags import with_flags
from vestige.cli.errors import refuse_if_given, refuse_others
from vestige.cli.terminal import LARGEST_SEED, Json, graceful_stop, print_json, stderr, stdout, step_progress
from vestige.files import make_folder

if TYPE_CHECKING:
    from vestige.audit.inference import Inference
    from vestige.audit.result import InAndOut
    from vestige.synthesis.attack import SyntheticMembership
    from vestige.training.results import OneRun


@dataclass(frozen=True, kw_only=True)
class AuditFlags:
    """The flags of `vestige audit`."""

    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run of `vestige train --audit` or `synthesize --audit`: print what its canaries show. With "
            "--membership synthetic, a folder of `vestige synthesize`."
        ),
    ] = None
    method: Annotated[
        str, typer.Option(help="What to attack: a method of `vestige methods`; with --membership also non-private.")
    ] = "dp-sgd"
    membership: Annotated[
        str | None,
        typer.Option(
            help="Ask who was trained on instead, by shadow models: loss, shadow, lira, lira-offline, gradients "
            "(white-box), several with commas, or all. synthetic: by the made-up rows or texts of RUN alone, with "
            "--data (rows that it was made of) and --others.",
            metavar="ATTACKS",
        ),
    ] = None
    shadows: Annotated[int, typer.Option(help="Shadow models of --membership, in pairs on the two halves.")] = 16
    targets: Annotated[int, typer.Option(help="Models that --membership attacks.")] = 5
    task: Annotated[
        str | None,
        typer.Option(
            help="stand-in (made up), a task of `vestige tasks`, or FILE.py:FUNCTION. "
            "[default: stand-in; digits-mlp for --membership]",
        ),
    ] = None
    data: Annotated[str | None, typer.Option(help="FILE.npz or folder with the task's data.")] = None
    others: Annotated[
        str | None,
        typer.Option(help="For --membership synthetic: a file of rows of the same kind that were not used."),
    ] = None
    canary: Annotated[
        str,
        typer.Option(
            help="gradient (beyond the bound, along a random direction), mislabelled or blank; selection: attack the "
            "accept bits of dpsur or dpsgd-br, against the papers' claim and our price."
        ),
    ] = "gradient"
    sees: Annotated[
        str | None,
        typer.Option(
            help="What the attacker sees: releases (all of them), model (the last one), state (buffers of memory and "
            "optimizer at the end; half of the runs choose which) or loss (of the canary at the last model). "
            "[default: releases for a gradient canary, loss for the others]"
        ),
    ] = None
    runs: Annotated[int, typer.Option(help="Runs, half of them with the canary.")] = 2000
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget: the noise follows from it.")] = None
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Accounted noise multiplier: epsilon follows from it.")
    ] = None
    delta: Annotated[float, typer.Option(help="Allowed failure probability.")] = 1e-5
    sample_rate: Annotated[float, typer.Option(help="Probability q that an example joins a step.")] = 0.05
    steps: Annotated[int, typer.Option("--steps", "--trials", help="Steps of each run.")] = 100
    lr: Annotated[str, typer.Option(help="Learning rate, or auto.")] = "auto"
    examples: Annotated[
        int | None,
        typer.Option(
            help="Other examples, the first of the task's; for --membership all, half of them members. "
            "[default: 100; 1000 for --membership]"
        ),
    ] = None
    confidence: Annotated[float, typer.Option(help="Of the lower bound.")] = 0.95
    minutes: Annotated[float, typer.Option(help="Stop starting runs after this long; what was made is judged.")] = 10.0
    seed: Annotated[int, typer.Option(help="Fixes the canary and the initial weights.", min=0, max=LARGEST_SEED)] = 0
    budget: Annotated[
        str | None,
        typer.Option(
            help="The book of the task's data (`vestige budget open`): all runs are charged before the first of them.",
            envvar="VESTIGE_BUDGET",
        ),
    ] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")] = None
    out: Annotated[
        Path | None, typer.Option(help="Also write the result, with the attacker's ROC, as JSON for `vestige report`.")
    ] = None
    as_json: Json = False


@with_flags(AuditFlags)
def audit(context: typer.Context, flags: AuditFlags) -> None:
    """Attack a method with a canary, and bound epsilon from below with a confidence.

    An audit proves no privacy. It proves that epsilon is at least so much, and exits with code 1 where that is more
    than the accountant says: a bug. Without a run it makes thousands of short ones, half of them with the canary.

    Examples:

        vestige audit --method fo-dp-sgd --epsilon 3 --runs 200 --steps 20

        vestige audit --method dp-sgd --epsilon 1 --runs 400 --out dp-sgd-1.json

        vestige audit --task digits-mlp --epsilon 8 --canary mislabelled --runs 200 --steps 20 --json

        vestige audit --method dpsur --canary selection --runs 400 --trials 30

        vestige audit --membership all --method non-private --examples 400 --steps 400

        vestige audit synth --membership synthetic --data reviews.jsonl --others other-reviews.jsonl
    """
    if flags.membership == "synthetic":
        allowed = ("run", "membership", "data", "others", "confidence", "as_json", "out")
        refuse_others(context, allowed, "--membership synthetic looks at a made-up set and trains nothing")
        _audit_synthetic(flags.run, flags.data, flags.others, flags.confidence, flags.out, flags.as_json)
        return
    refuse_if_given(context, ("others",), "it is of --membership synthetic")
    if flags.run is not None:
        refuse_others(context, ("run", "as_json", "out"), "a run of `vestige train --audit` has been made already")
        _audit_run(flags.run, flags.out, flags.as_json)
        return
    if flags.canary == "selection":
        allowed = ("method", "canary", "runs", "steps", "delta", "confidence", "as_json")
        refuse_others(context, allowed, "the attack on accept bits makes its own data and noise")
        _audit_selection(flags.method, flags.runs, flags.steps, flags.delta, flags.confidence, flags.as_json)
        return
    from vestige.cli.models.flags import learning_rate
    from vestige.tf32 import check_device, default_device

    if flags.epsilon is not None and flags.noise_multiplier is not None:
        raise ValueError(
            f"epsilon={flags.epsilon} and noise_multiplier={flags.noise_multiplier}: the noise follows from epsilon"
        )
    if not flags.minutes > 0:
        raise ValueError(f"minutes={flags.minutes} must be positive")
    where = flags.device or default_device()
    check_device(where)
    if flags.membership is not None:
        why = "--membership trains no canary; it has --shadows and --targets"
        refuse_if_given(context, ("canary", "sees", "runs", "minutes"), why)
        _audit_membership(flags, flags.membership, where)
        return
    refuse_if_given(context, ("shadows", "targets"), "they are of --membership")
    from vestige.audit.in_and_out import audit as attack

    if flags.epsilon is None and flags.noise_multiplier is None:
        raise ValueError("give --epsilon or --noise-multiplier: what is to be attacked")
    with step_progress(not flags.as_json) as bar, graceful_stop() as stopping:
        show = bar(flags.method, flags.runs)

        def on_runs(done: int) -> bool:
            show(done, None, None, None)
            return not stopping()

        found = attack(
            flags.method,
            task=flags.task or "stand-in",
            data=flags.data,
            budget=flags.budget,
            canary=flags.canary,
            sees=flags.sees,
            runs=flags.runs,
            epsilon=flags.epsilon,
            noise_multiplier=flags.noise_multiplier,
            delta=flags.delta,
            sample_rate=flags.sample_rate,
            steps=flags.steps,
            lr=learning_rate(flags.lr),
            examples=100 if flags.examples is None else flags.examples,
            confidence=flags.confidence,
            seconds=60 * flags.minutes,
            seed=flags.seed,
            device=where,
            on_runs=on_runs,
        )
    _write(found, flags.out)
    if flags.as_json:
        print_json(found.to_json())
    else:
        _print(found)
    if found.contradicts:
        sys.exit(1)


def _audit_membership(flags: AuditFlags, attacks: str, device: str) -> None:
    from vestige.audit.inference import ATTACKS, infer_membership
    from vestige.cli.models.flags import learning_rate

    with step_progress(not flags.as_json) as bar, graceful_stop() as stopping:
        show_models = bar(flags.method, flags.shadows + flags.targets)

        def on_models(done: int) -> bool:
            show_models(done, "shadow models" if done < flags.shadows else "targets", None, None)
            return not stopping()

        _print_membership(
            infer_membership(
                flags.method,
                task=flags.task or "digits-mlp",
                attacks=tuple(ATTACKS) if attacks == "all" else attacks.split(","),
                shadows=flags.shadows,
                targets=flags.targets,
                examples=1000 if flags.examples is None else flags.examples,
                epsilon=flags.epsilon,
                noise_multiplier=flags.noise_multiplier,
                delta=flags.delta,
                sample_rate=flags.sample_rate,
                steps=flags.steps,
                lr=learning_rate(flags.lr),
                confidence=flags.confidence,
                device=device,
                seed=flags.seed,
                data=flags.data,
                budget=flags.budget,
                on_models=on_models,
            ),
            flags.as_json,
        )


def _print(found: InAndOut) -> None:
    from vestige.audit.in_and_out import VIEWS

    if found.nonprivate:
        stderr.print(
            f"the runs were trained on examples of {found.task}: this audit is not private, keep it to yourself unless "
            "they are public",
            markup=False,
        )
    way = "stacked" if found.stacked else "one by one, since they do not stack"
    fewer = "" if found.runs == found.wanted else f" of {found.wanted} that were asked for"
    if found.sees == "state":
        fewer += ", beside those that chose the buffer,"
    lines = [
        f"{found.method}, {found.canary} canary among {found.examples} examples of {found.task}; {VIEWS[found.sees]}",
        f"{found.runs} runs{fewer} of {found.steps} steps at rate {found.sample_rate:g}, half of them with the canary "
        f"({way}, {found.seconds:g} s)",
        f"epsilon is at least {found.epsilon_lower_bound:.3f} ({found.confidence:.4g} confidence, no assumption, by "
        f"the {'ROC area' if found.bounded_by == 'area' else 'best threshold'}) and "
        f"at most {found.epsilon:.3f} (accountant) at delta {found.delta:g}",
        f"estimate, if scores are normal: {found.epsilon_estimate:.3f}, at least {found.epsilon_estimate_low:.3f} "
        f"({found.confidence:.4g}); mu {found.mu:.3f}",
        f"ROC area {found.area}"
        + ("" if found.area_allowed is None else f", at most {found.area_allowed:.3g} by the accountant")
        + f"; detected at 1% false alarms {found.detection_at_1_percent}",
    ]
    if found.noise_factor is not None:
        lines.insert(
            3,
            f"estimate by the ROC's area: epsilon {found.epsilon_by_area:.3f}, at least "
            f"{found.epsilon_by_area_low:.3f} ({found.confidence:.4g}); the noise looks like {found.noise_factor} of "
            "what was priced",
        )
    for line in lines:
        stdout.print(line, markup=False)
    stdout.print(_verdict(found), markup=False)


def _verdict(found: InAndOut) -> str:
    if not found.contradicts:
        return "no contradiction: the accountant's promise stands, as far as this attack can tell"
    if found.epsilon_lower_bound > found.epsilon:
        return "CONTRADICTION: the lower bound exceeds the accountant's epsilon, which is wrong for this code"
    if found.curve_broken_by is None or found.curve_broken_by <= 0:
        return "CONTRADICTION: the ROC's area is more than the accountant's curve allows"
    return (
        f"CONTRADICTION: {found.curve_detected:.1%} detected at {found.curve_false_alarms:.1%} false alarms (both "
        f"bounded, {found.confidence:.4g} confidence) is more than the accountant's curve allows"
    )


def _print_membership(found: Inference, as_json: bool) -> None:
    from vestige.audit.inference import ATTACKS

    if found.nonprivate:
        stderr.print(
            f"every model was trained on a random half of {found.examples} examples of {found.task}: this changes whom "
            "models are trained on, and what is printed is not private; keep it to yourself unless they are public",
            markup=False,
        )
    if as_json:
        print_json(found.to_json())
        return
    price = "no privacy" if found.epsilon is None else f"epsilon {found.epsilon:.3f} each at delta {found.delta:g}"
    fewer = "" if found.targets == found.wanted else f" of {found.wanted} that were asked for"
    table = Table("attack", "ROC area", "detected at 1% false alarms", "at 0.1%")
    for name, success in found.attacks.items():
        cells = (success.area, success.detected_at_1_percent, success.detected_at_1_permille)
        table.add_row(name, *(f"{each.estimate:.3f} ({each.low:.3f} to {each.high:.3f})" for each in cells))
    for line in (
        f"{found.method} on {found.task}, {price}: {found.targets} targets{fewer}, {found.shadows} shadow models, "
        f"{found.examples // 2} members each, {found.steps} steps at rate {found.sample_rate:g} ({found.seconds:g} s)",
        f"right about {found.nonprivate_accuracy_of_members:.1%} of members and "
        f"{found.nonprivate_accuracy_of_others:.1%} of others",
    ):
        stdout.print(line, markup=False)
    stdout.print(table)
    over = "targets" if found.targets > 1 else "examples"
    few = "" if found.examples >= 2000 else f"; of {found.examples // 2} others, 0.1% means none"
    lines = [f"{name}: {ATTACKS[name]}" for name in found.attacks]
    for line in (*lines, f"intervals over {over}, {found.confidence:.4g} confidence; an area of 0.5 is guessing{few}"):
        stdout.print(line, markup=False)


def _audit_selection(method: str, runs: int, trials: int, delta: float, confidence: float, as_json: bool) -> None:
    from vestige.audit.accept_bits import attack_selection

    found = attack_selection(method, runs=runs, trials=trials, delta=delta, confidence=confidence)
    if as_json:
        print_json(found.to_json())
    else:
        verdict = "BROKEN" if found.claim_broken else "not broken by so many runs"
        lines = [
            f"{found.method}: the first accepted of up to {found.trials} candidates, all noise; {found.runs} runs",
            f"ROC area {found.area}",
            f"the papers' claim for one accepted update, epsilon {found.claimed_epsilon:.3f}, allows "
            f"{found.claimed_area:.3f}: {verdict}",
            f"our price of {found.trials} trials, epsilon {found.epsilon:.3f}, allows {found.allowed_area:.3f}: "
            + ("CONTRADICTION" if found.contradicts else "it stands"),
        ]
        for line in lines:
            stdout.print(line, markup=False)
    if found.contradicts:
        sys.exit(1)


def _write(found: InAndOut | OneRun | SyntheticMembership, out: Path | None) -> None:
    if out is not None:
        make_folder(out.parent, "out")
        out.write_text(json.dumps(found.to_json(), allow_nan=False), encoding="utf-8")
        stderr.print(f"wrote {out}", markup=False)


def _audit_synthetic(
    run: Path | None, data: str | None, others: str | None, confidence: float, out: Path | None, as_json: bool
) -> None:
    from vestige.synthesis.attack import attack

    if run is None or data is None or others is None:
        raise ValueError("others=None: give a folder of vestige synthesize, --data (its private rows) and --others")
    found = attack(run, data, others, confidence)
    stderr.print("this compares private rows without noise: keep what is printed to yourself", markup=False)
    _write(found, out)
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines():
            stdout.print(line, markup=False)
    if found.contradicts:
        sys.exit(1)


def _audit_run(run: Path, out: Path | None, as_json: bool) -> None:
    from vestige.audit.read_one_run_audit import read

    found = read(run)
    _write(found, out)
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines():
            stdout.print(line, markup=False)
    if found.contradicts:
        sys.exit(1)
