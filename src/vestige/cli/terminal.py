"""What do all commands share? Consoles for both output streams, a progress bar, and handlers for Ctrl-C."""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from threading import Timer
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vestige.cli.errors import INTERRUPTED, fail
from vestige.processes.torchrun import followed

stderr = Console(stderr=True, highlight=False, soft_wrap=True, quiet=followed())
stdout = Console(highlight=False, soft_wrap=True, quiet=followed())

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]

Trust = Annotated[
    bool, typer.Option("--trust", help="With --resume: run the program FILE.py:FUNCTION that the folder names.")
]

LARGEST_SEED = 2**63 - 1


def dated_folder(name: str) -> Path:
    """runs/NAME-TIME for what is made without --out; a number follows where another was begun in the same second."""
    dated = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (dated.with_name(f"{dated.name}-{number}") for number in count(2))
    return next(path for path in chain((dated,), numbered) if not path.exists())


def print_json(content: dict[str, object]) -> None:
    if not followed():
        print(json.dumps(content, allow_nan=False))


@contextmanager
def verified(fault: type[ValueError], as_json: bool) -> Iterator[None]:
    """Say that something did not hold, by an exit code of 1, where a check raises `fault`."""
    try:
        yield
    except fault as error:
        if as_json:
            print_json({"verified": False, "reason": str(error)})
        fail(f"NOT VERIFIED: {error}", 1)


def meant(result: dict[str, object], unit: str = "example") -> list[str]:
    """What an epsilon means, in words, from the fields of an `accounting.Meaning`; `unit` is what is hidden."""
    if result.get("attacker_accuracy") is None:
        return []
    lines = [
        f"at most: an attacker who sees all releases is right about one {unit}'s presence "
        f"{result['attacker_accuracy']:.1%} of the time, and detects {result['detection_at_1_percent']:.1%} at 1% "
        "false alarms"
    ]
    if result.get("gaussian_mu") is not None:
        lines.append(f"no worse than a Gaussian mechanism of mu {result['gaussian_mu']:.3g}, down to this delta")
    if result.get("epsilon_replacing") is not None:
        by = "" if result["replacing_by"] == "theorem" else ", as removing and adding"
        lines.append(f"epsilon {result['epsilon_replacing']:.4g} for replacing one {unit} by another{by}")
    return lines


Show = Callable[[int, str | None, float | None, float | None], None]
"""Steps done, a public note (None: the last one stays), spent epsilon and the budget."""


@contextmanager
def step_progress(visible: bool) -> Iterator[Callable[[str, int], Show]]:
    """A live bar on standard error: steps, a note about public things, spent epsilon and the budget, time left."""
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, disable=not (visible and stderr.is_terminal)) as progress:

        def bar(title: str, total: int) -> Show:
            line = progress.add_task(title, total=total, note="", spent="")

            def show(done: int, note: str | None, spent: float | None, budget: float | None) -> None:
                fields = {"spent": _spent(spent, budget)}
                if note is not None:
                    fields["note"] = note
                progress.update(line, completed=done, **fields)  # type: ignore[arg-type]

            return show

        yield bar


def _spent(spent: float | None, budget: float | None) -> str:
    if spent is None:
        return "no epsilon"
    return f"epsilon {spent:.2f}" + (f" of {budget:g}" if budget is not None else "")


@contextmanager
def graceful_stop() -> Iterator[Callable[[], bool]]:
    """Ctrl-C (or SIGTERM) once: finish the step, save, stop. Twice: stop at once."""
    stop = False

    def handle(number: int, frame: object) -> None:
        nonlocal stop
        if stop:
            os._exit(INTERRUPTED)
        stop = True
        stderr.print("stopping after this step (again: at once)", markup=False)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[Callable[[], None]]:
    """SIGTERM ends a command as Ctrl-C does, so that its worker processes are stopped too.

    An interrupt that arrives in a destructor or a callback of the garbage collector cannot be raised there: Python
    would report and forget it, and the command would run on. It is sent again. One that another library's `except`
    swallowed is raised once more by the function that is yielded, to be called now and then.
    """
    asked = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    def raise_if_asked() -> None:
        if asked:
            raise KeyboardInterrupt

    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    report = sys.unraisablehook

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            Timer(0.01, _thread.interrupt_main).start()  # at once, it would be raised in here, and lost too
        else:
            report(unraisable)

    sys.unraisablehook = send_again
    try:
        yield raise_if_asked
    finally:
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)
