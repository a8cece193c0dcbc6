"""Can a run, or a model before its run, be trusted? `vestige verify` and `vestige doctor`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vestige.assumptions import lines
from vestige.cli.errors import fail
from vestige.cli.terminal import LARGEST_SEED, Json, meant, print_json, stderr, stdout, verified

if TYPE_CHECKING:
    from vestige.accounting import Guarantee


def verify(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of a comparison.")],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also accept a run that is not finished: what it cost so far.")
    ] = False,
    rows_per_user: Annotated[
        int | None, typer.Option(help="Also say what the run means for a person who has at most so many rows.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Recompute a run's epsilon from its ledger alone, and hold its result, model and checkpoint against it.

    Any edit, gap or reuse of a step fails, and so does a run that is not finished (exit code 1).

    Of a comparison, every record's epsilon is recomputed from what the record says was charged.

    Examples:

        vestige verify runs/digits-mlp-fo-dp-sgd-20260101-120000

        vestige verify runs/digits-mlp-fo-dp-sgd-20260101-120000 --rows-per-user 4

        vestige verify runs/compare-20260101-120000
    """
    if (run / "spec.json").exists():
        if rows_per_user is not None:
            raise ValueError(f"rows_per_user={rows_per_user}: for the folder of one run, not of a comparison")
        _verify_comparison(run, as_json)
    else:
        _verify_run(run, unfinished, rows_per_user, as_json)


def _verify_comparison(folder: Path, as_json: bool) -> None:
    from vestige.compare.verify import verify_comparison

    verdict = verify_comparison(folder)
    if as_json:
        print_json(verdict.to_json())
    for name, fault in verdict.wrong.items():
        stderr.print(f"runs/{name.removesuffix('.json')}.json: {fault}", markup=False)
    if verdict.wrong:
        fail(f"NOT VERIFIED: {len(verdict.wrong)} records do not hold, {verdict.verified} do", 1)
    elif not as_json:
        failed = f"; {verdict.failed_runs} more ended in an error" if verdict.failed_runs else ""
        stdout.print(f"verified: {verdict.verified} runs cost what their records state{failed}", markup=False)
        if verdict.largest_epsilon is not None:
            stdout.print(f"the largest epsilon of one run, released alone, is {verdict.largest_epsilon:.4f}")


def _verify_run(run: Path, unfinished: bool, rows_per_user: int | None, as_json: bool) -> None:
    from vestige.accounting.ledger import LedgerError
    from vestige.integrations.model_card import unchecked_pages
    from vestige.synthesis.output import check_card
    from vestige.training.verify import verify as check

    with verified(LedgerError, as_json):
        verdict = check(run, unfinished=unfinished, rows_per_user=rows_per_user)
        if verdict.finished:
            verdict = replace(verdict, unchecked=(*verdict.unchecked, *unchecked_pages(run)))
            check_card(run)
    if as_json:
        print_json(verdict.to_json())
        return
    promise = verdict.guarantee
    if not verdict.finished:
        stdout.print("this run is not finished: what follows is what it cost so far", markup=False)
    stdout.print(
        f"verified: {verdict.asked} charged questions in {verdict.attempts} attempt(s), {verdict.rows} chained rows",
        markup=False,
    )
    _print_promise(promise)
    if verdict.for_user is not None:
        _print_promise(verdict.for_user)
    for line in lines(promise.listed):
        stdout.print(line, markup=False)
    if verdict.unchecked:
        stdout.print(f"unchecked, since the ledger says nothing about it: {', '.join(verdict.unchecked)}", markup=False)


def _print_promise(promise: Guarantee) -> None:
    if promise.epsilon is None:
        stdout.print(f"no epsilon ({promise.adjacency}): " + "; ".join(promise.reasons), markup=False)
        return
    by_renyi = "" if promise.accountant.startswith("group") else f"; by Renyi {promise.epsilon_rdp:.4f}"
    stdout.print(
        f"epsilon {promise.epsilon:.4f} at delta {promise.delta:g} ({promise.accountant}{by_renyi}), "
        f"{promise.adjacency}",
        markup=False,
    )
    if promise.meaning is not None:
        for line in meant(vars(promise.meaning), promise.unit):
            stdout.print(line, markup=False)


def doctor(
    task: Annotated[
        str,
        typer.Argument(help="A task of `vestige tasks`, or FILE.py:FUNCTION returning (model, loss, data or loader)."),
    ],
    data: Annotated[str | None, typer.Option(help="FILE.npz or folder with the task's data.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.", min=0, max=LARGEST_SEED)] = 0,
    fix: Annotated[
        bool, typer.Option("--fix", help="Examine the model as vestige.fix leaves it: layers that mix replaced.")
    ] = False,
    parity: Annotated[
        bool, typer.Option("--parity", help="Also prove, on one batch, that the fast engine equals the reference.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Examples in that batch.")] = 64,
    physical_batch: Annotated[
        str | None,
        typer.Option("--max-physical-batch-size", help="auto: also find how many examples fit in memory at once."),
    ] = None,
    sample_rate: Annotated[float, typer.Option(help="Sampling rate whose samples are to fit, for that.")] = 0.05,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")] = None,
    as_json: Json = False,
) -> None:
    """Examine a model and its data before training; name what is at fault (exit code 1 if anything is).

    What it prints is computed from your data without noise: it is for you, not for publication.

    Examples:

        vestige doctor digits-mlp

        vestige doctor my_project.py:make --fix --parity --max-physical-batch-size auto
    """
    from vestige import tasks
    from vestige.engines.parity import compare_engines
    from vestige.engines.replacements import fix as fixed
    from vestige.engines.replacements import replacements
    from vestige.tf32 import check_device, default_device
    from vestige.training.doctor import examine, first_examples, largest_batch

    if batch < 1:
        raise ValueError(f"batch={batch} must be a whole number from 1 up")
    if physical_batch not in (None, "auto"):
        raise ValueError(
            f"max_physical_batch_size={physical_batch!r} must be 'auto' here: it is what the doctor looks for"
        )
    model, loss, examples = tasks.subject(task, data, seed)
    where = device or default_device()
    check_device(where)
    model.to(where)
    replaced = replacements(model) if fix else []
    if fix:
        model = fixed(model)
    findings = examine(model, loss, examples)
    wrong = any(finding.level == "error" for finding in findings)
    result: dict[str, object] = {"healthy": not wrong, "findings": [vars(finding) for finding in findings]}
    if fix:
        result["replaced"] = replaced
    if parity and not wrong:
        agreement = compare_engines(model, loss, first_examples(examples, batch))
        result["parity"] = agreement.to_json()
        wrong = not agreement.agrees
    if physical_batch and result["healthy"]:
        result["physical_batch"] = largest_batch(model, loss, examples, sample_rate)
    if as_json:
        print_json(result)
    else:
        _print_diagnosis(task, result)
    if wrong:
        sys.exit(1)


def _print_diagnosis(task: str, result: dict[str, Any]) -> None:
    if "replaced" in result:
        for line in result["replaced"]:
            stdout.print(f"replaced: {line}", markup=False)
        way = "in Python: model = vestige.fix(model)" if result["replaced"] else "vestige.fix finds nothing to replace"
        stdout.print(way, markup=False)
    for finding in result["findings"]:
        stdout.print(f"{finding['level']}: {finding['where']}: {finding['what']}", markup=False)
    if not result["findings"]:
        stdout.print(f"{task}: nothing found; every example has a gradient of its own", markup=False)
    if "parity" in result:
        _print_parity(result["parity"])
    if "physical_batch" in result:
        stdout.print(f"physical batch: {result['physical_batch']}", markup=False)


def _print_parity(parity: dict[str, Any]) -> None:
    word = "agree" if parity["agrees"] else "DISAGREE"
    stdout.print(
        f"the engines {word} on {parity['examples']} examples; relative error of each clipped sum:", markup=False
    )
    for name, error in parity["errors"].items():
        stdout.print(f"  {name}: {error:.1e}", markup=False)
    for name, cost in parity["engines"].items():
        memory = "" if cost["peak_mib"] is None else f", {cost['peak_mib']:.0f} MiB at most"
        shown = "bookkeeping without CUDA graphs" if name == "unrecorded" else name
        stdout.print(f"{shown}: {cost['seconds'] * 1e3:.2f} ms a batch{memory}", markup=False)
