"""How do the tests call `vestige`? In this process, or as a process of its own."""

import json
import signal
import subprocess
import sys

from typer.testing import CliRunner

from vestige.cli import main

TRAIN = ["train", "--task", "digits-mlp", "--epsilon", "8", "--sample-rate", "0.05", "--steps", "20"]


def vestige(*words):
    """The command in this process: exit code, standard output, standard error."""
    result = CliRunner().invoke(main.app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def as_json(*words):
    code, out, error = vestige(*words, "--json")
    assert code == 0, error
    assert out.count("\n") == 1
    return json.loads(out)


def started(*words, **options):
    """The command as a process that runs."""
    return subprocess.Popen(
        [sys.executable, "-m", "vestige.cli.main", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whatever runs the tests in the background may ignore Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def finished(*words):
    """The command as a process that has ended: exit code, standard output, standard error."""
    process = started(*words)
    out, error = process.communicate()
    return process.returncode, out, error
