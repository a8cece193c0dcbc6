"""How does a command report a mistake? In one line that names flags, and by an exit code.

2 for wrong usage, 1 for a failed check or an error of the operating system, 130 for Ctrl-C.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from vestige.priced_questions import BudgetSpent
from vestige.processes.torchrun import followed
from vestige.renaming import CLIP, GRAPHS, NOISE, PARTS, Now

INTERRUPTED = 130


class FlagCommand(TyperCommand):
    """A command whose errors name flags where the library's errors name arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = present_flags(args, [flag for each in self.params for flag in (*each.opts, *each.secondary_opts)])
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "param", None) is not None and getattr(error, "message", None):
                error.message = _with_value(error, words)  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            raise ValueError(in_flags(str(error), (flag for each in self.params for flag in each.opts))) from error


EARLIER = {**CLIP, **PARTS, **NOISE, **GRAPHS, "batch": Now("batch_size")}


def present_flags(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a command line with flags by their present names; each earlier one is named on standard error.

    >>> present_flags(["--noise", "float32", "--steps", "5"], ["--secure-mode", "--no-secure-mode", "--steps"])
    ['--no-secure-mode', '--steps', '5']
    """
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        now = EARLIER.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        new = "" if now is None else f"--{now.name.replace('_', '-')}"
        if now is None or new not in known or (flag in known and not now.stays):
            found.append(word)
            continue
        if now.values is None:
            instead = [f"{new}={value}"] if equals else [new]
        else:
            value = value if equals else next(iter(rest), "")
            if value not in now.values:
                if now.stays:
                    found.append(word)
                    continue
                raise ValueError(f"{flag}={value} is unknown; choose from {', '.join(now.values)}")
            rest = rest if equals else rest[1:]
            instead = [new if now.values[value] else f"--no-{new[2:]}"]
        said = flag if now.values is None else f"{flag} {value}"
        print(f"vestige: {said} is called {instead[0].partition('=')[0]} now; it goes with 0.4", file=sys.stderr)
        found += instead
    return found


def _with_value(error: Any, words: list[str]) -> str:
    """Typer's message about a value that it cannot parse, with the value; the last one if a flag was repeated."""
    given = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, rest = word.partition("=")
        if name in error.param.opts:
            given.append(repr(rest if equals else following))
    counted = given if getattr(error.param, "multiple", False) else given[-1:]
    return f"{', '.join(counted)}: {error.message}" if counted else str(error.message)


def in_flags(message: str, options: Iterable[str]) -> str:
    """The message of a Python error, with flags where it names arguments.

    >>> in_flags("sample_rate=2 must lie in (0, 1]; give steps=5, too", ["--sample-rate", "--steps"])
    '--sample-rate=2 must lie in (0, 1]; give --steps=5, too'
    """
    flags = {option.lstrip("-").replace("-", "_"): option for option in options if option.startswith("--")}

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        # A word without "=" or an underscore may be plain English: delta, share, task.
        if name not in flags or (value is None and "_" not in name):
            return match[0]
        return flags[name] + {None: "", "=None": " is missing"}.get(value, "=")

    # Only at the start of a word: text inside a path or a quoted value is the user's own.
    return re.sub(r"(?<![^\s(])([a-z]\w*)\b(=None\b|=(?!=))?", flag, message)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn any error that ends the command into one line on standard error and an exit code."""
    try:
        yield
    except typer.Abort:
        fail("interrupted", INTERRUPTED)
    except BudgetSpent as error:
        fail(re.sub(r" \(`except .*?`\)", "", str(error)), 1)  # what a loop in Python would do
    except ValueError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}" if error.filename is not None else str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error has it, whichever click typer uses
            raise
        _fail_of_usage(error)


def _fail_of_usage(error: Any) -> None:
    message = error.format_message().strip()
    if not message:  # there were no arguments, so the help was printed
        sys.exit(error.exit_code)
    where = getattr(error, "ctx", None)
    hint = f"; see {where.command_path} --help" if where is not None else ""
    fail(message.rstrip(".") + hint, error.exit_code)


SECONDS_FOR_PROCESS_0 = 5.0
"""How long another process of torchrun leaves a mistake to process 0, which makes the same one, to report."""


def fail(message: str, code: int) -> None:
    """End the command with one line. Of several processes the first reports it: torchrun ends the others when that one
    exits, and would end it unheard if another exited before. What it does not meet within seconds is another's own."""
    who = "vestige"
    if followed():
        time.sleep(SECONDS_FOR_PROCESS_0)
        who = f"vestige (process {os.environ['RANK']})"
    print(f"{who}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def require_trust(folder: Path, tasks: Iterable[str], trust: bool) -> None:
    """Refuse to run programs that only a folder names, unless its reader trusts them: it may be a stranger's."""
    programs = sorted({task for task in tasks if ".py:" in task})
    if programs and not trust:
        named = ", ".join(ascii(task)[1:-1] for task in programs)
        raise ValueError(
            f"resume={str(folder)!r} would run a program that the folder names, {named}: read it, then add --trust"
        )
    if trust and not programs:
        raise ValueError(f"trust=True: {str(folder)!r} names no program; leave it out")


def refuse_others(context: typer.Context, allowed: tuple[str, ...], why: str) -> None:
    """Refuse, by name, every given option outside `allowed`: it would be ignored."""
    for parameter in context.command.params:
        if parameter.name not in allowed:
            refuse_if_given(context, (str(parameter.name),), why)


def refuse_if_given(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Refuse those of these options that were given on the command line: they would be ignored."""
    for parameter in context.command.params:
        if parameter.name in names and given(context, str(parameter.name)):
            raise ValueError(f"{parameter.opts[0]} cannot be given too: {why}")


def given(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")
