"""What can a folder or a ledger that somebody else made do to its reader? Neither run, nor forge, nor crash."""

import functools
import html
import json
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from commands import as_json
from commands import vestige as command
from conftest import make_toy
from vestige.accounting.ledger import GENESIS, LedgerError, _seal
from vestige.assumptions import ASSUMPTIONS
from vestige.integrations.model_card import escaped
from vestige.training.verify import verify

EVIL = "<script>alert(1)</script> | # forged [x](http://y) `code` **bold**"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strange") / "run"
    model, data = make_toy()
    given = {"method": "fo-dp-sgd", "epsilon": 3, "delta": 1e-3, "sample_rate": 0.2, "steps": 2}
    for _ in vestige.train(model, nn.functional.cross_entropy, data, **given, out=folder):
        pass
    found = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [row for row in found if row["row"] != "finish"]


def crafted(folder, rows):
    """A ledger of these rows whose hashes are sound."""
    head, lines = GENESIS, []
    for number, row in enumerate(rows):
        row = {key: value for key, value in row.items() if key != "hash"} | {"previous": head, "seq": number}
        head = _seal(row)
        lines.append(json.dumps({**row, "hash": head}) + "\n")
    (folder / "ledger.jsonl").write_text("".join(lines))
    return folder


def changed(rows, kind, /, **facts):
    place = next(number for number, row in enumerate(rows) if row["row"] == kind)
    row = {**rows[place], **facts}
    return [*rows[:place], {key: value for key, value in row.items() if value != "GONE"}, *rows[place + 1 :]]


@pytest.mark.parametrize(
    "facts",
    [
        {"sampling": EVIL},
        {"noise": EVIL},
        {"method": EVIL},
        {"method": {"name": EVIL, "options": {EVIL: EVIL, "n\nl": "a\nb"}, "parts": {EVIL: [EVIL]}}},
    ],
    ids=["sampling", "noise", "method", "options"],
)
def test_a_card_of_a_crafted_ledger_is_text_and_nothing_else(rows, tmp_path, facts):
    page = vestige.model_card(crafted(tmp_path, changed(rows, "open", **facts)))
    for piece in ("<script", "# forged", "[x]", "`code`", "**bold**"):
        assert piece not in page
    assert "&lt;script&gt;" in page
    ours = {"## Differential privacy", "### What it rests on", "### What is not covered", "### How to check it"}
    assert {line for line in page.splitlines() if line.startswith("#")} == ours
    pipes = [line.count("|") for line in page.splitlines() if line.startswith("|")]
    assert set(pipes) == {3, 5}


def test_the_detail_of_an_assumption_is_text_too(rows, tmp_path):
    page = vestige.model_card(crafted(tmp_path, changed(rows, "assumption", detail=EVIL)))
    assert "<script" not in page
    assert escaped(EVIL) in page


def test_what_is_escaped_reads_as_it_was_written():
    assert html.unescape(escaped(EVIL)) == EVIL
    assert escaped("two\nlines\x1b[31m\u202e") == "two lines &#91;31m"


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        ("open", {"delta": 0.9}, "delta=0.9 is not below 1/N"),
        ("open", {"delta": "x\n# y"}, "delta is 'x\\\\n# y', which no run writes"),
        ("open", {"population": "GONE"}, "the fact 'population' is missing"),
        ("open", {"noise": "GONE"}, "the fact 'noise' is missing"),
        ("open", {"sampling": []}, "sampling is"),
        ("open", {"coordinates": None}, "coordinates is None"),
        ("open", {"arithmetic": "decimal"}, "arithmetic='decimal' is unknown"),
        ("open", {"version": "3\n"}, "ledger version '3"),
        ("ask", {"step": "GONE"}, "'step' is missing"),
        ("ask", {"rate": "GONE"}, "'rate' is missing"),
        ("ask", {"rate": None}, "rate=None must be a number"),
        ("ask", {"multiplier": 1e308}, "must lie between 1e-100 and 1e[+]100"),
        ("ask", {"multiplier": 1e-308}, "must lie between 1e-100 and 1e[+]100"),
        ("ask", {"multiplier": "x\n"}, "must be a number"),
        ("ask", {"kind": []}, "kind is"),
        ("ask", {"multiplier": float("inf")}, "multiplier is inf"),
        ("ask", {"kind": "exponential-mechanism", "choice_epsilon": 1e300}, "choice_epsilon=1e[+]300 must lie between"),
        ("open", {"schedule": "filtered"}, "line 1: the fact 'filter_epsilon' of a filtered run is missing"),
        ("open", {"schedule": "filtered", "filter_epsilon": 1}, "line 1: the fact 'filter_expects' of a filtered run"),
        ("open", {"schedule": "filtered", "filter_epsilon": None}, "line 1: filter_epsilon is None"),
        ("open", {"filter_expects": [{"kind": "gaussian"}]}, "line 1: filter_expects is"),
        ("open", {"users": 5}, "line 1: users is 5"),
        ("open", {"users": {"sample": "users", "users": 9, "foo": 3}}, "line 1: users is"),
        ("open", {"users": {"sample": "users", "users": 9, "choices": [5]}}, "line 1: users is"),
        ("open", {"groups": 5}, "line 1: groups is 5"),
        ("open", {"synthesis": "\ud800"}, "line 1: synthesis is"),
        (
            "open",
            {"normalise": functools.reduce(lambda inner, _: [inner], range(40), [])},
            "line 1: .*nested deeper than",
        ),
        (
            "ask",
            {"kind": "allocated-gaussian", "steps": 10**30, "multiplier": 1.0},
            "must be at most 1e[+]12 in an epoch",
        ),
        (
            "ask",
            {"kind": "truncated-gaussian", "rate": 0.1, "multiplier": 1.0, "most": 5, "population": 10**15},
            "population=1000000000000000 must be at most 1e[+]12",
        ),
    ],
)
def test_a_fact_that_is_wrong_or_missing_is_one_line(rows, tmp_path, kind, facts, words):
    crafted(tmp_path, changed(rows, kind, **facts))
    for read in (lambda: verify(tmp_path, unfinished=True), lambda: vestige.model_card(tmp_path)):
        with pytest.raises((LedgerError, ValueError), match=words) as error:
            read()
        assert "\n" not in str(error.value)
    code, out, error = command("verify", tmp_path, "--unfinished")
    assert (code, out) == (1, "")
    assert error.count("\n") == 1


def test_lists_nested_beyond_what_python_follows_are_one_line(rows, tmp_path):
    ledger = crafted(tmp_path, rows) / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([lines[0], "[" * 100_000 + "]" * 100_000 + "\n", *lines[1:]]))
    code, out, error = command("verify", tmp_path, "--unfinished")
    assert (code, out) == (1, "")
    assert "line 2: not a row, or lists and objects are nested deeper than 32" in error


def test_an_epoch_of_many_steps_takes_no_memory(rows, tmp_path):
    place = next(number for number, row in enumerate(rows) if row["row"] == "ask")
    asked = {"kind": "allocated-gaussian", "steps": 10**12, "multiplier": 1.0}
    crafted(tmp_path, [{**rows[0], "sampling": "allocation"}, *rows[1:place], {**rows[place], **asked}])
    assert verify(tmp_path, unfinished=True).asked == 1
    late = {**rows[place], **asked, "step": 10**12 + 1}
    crafted(tmp_path, [{**rows[0], "sampling": "allocation"}, *rows[1:place], {**rows[place], **asked}, late])
    with pytest.raises(LedgerError, match="where step 1, part 0 or step 1000000000000, part 0 was due"):
        verify(tmp_path, unfinished=True)


def test_a_card_of_users_whose_number_is_not_written_down(rows, tmp_path):
    place = next(number for number, row in enumerate(rows) if row["row"] == "ask")
    asked = {"kind": "grouped-gaussian", "rate": 1e-8, "multiplier": 0.9, "group": 10**7, "cap": 3}
    users = {"sample": "rows", "rows_per_user": 10**7, "cap": 3}
    crafted(tmp_path, [{**rows[0], "users": users}, *rows[1:place], {**rows[place], **asked}])
    assert "| What is protected | one user: all rows of one (who owns which row is public)" in vestige.model_card(
        tmp_path
    )


@pytest.mark.parametrize("multiplier", [1e308, 1e101])
def test_more_noise_than_a_float_can_square_is_refused(multiplier):
    model, data = make_toy()
    given = {"delta": 1e-3, "sample_rate": 0.2, "steps": 2, "noise_multiplier": multiplier}
    with pytest.raises(ValueError, match="must be at most 1e"):
        vestige.train(model, nn.functional.cross_entropy, data, method="dp-sgd", **given)
    call = ("account", "--sample-rate", 0.1, "--steps", 2, "--noise-multiplier", multiplier)
    code, _, error = command(*call)
    assert (code, error.count("\n")) == (2, 1)
    engine = vestige.PrivacyEngine()
    with pytest.raises(ValueError, match="must be at most 1e"):
        engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
            data_loader=DataLoader(TensorDataset(*data), batch_size=12), noise_multiplier=multiplier,
        )  # fmt: skip


PROGRAM = """
from pathlib import Path
import torch
from torch import nn

def make():
    Path({mark!r}).write_text("ran")
    rows = torch.randn(60, 4), torch.randint(2, (60,))
    others = torch.randn(20, 4), torch.randint(2, (20,))
    return nn.Linear(4, 2), nn.functional.cross_entropy, rows, others
"""


def test_a_folder_does_not_run_the_program_that_it_names(tmp_path):
    mark, program = tmp_path / "mark", tmp_path / "task.py"
    program.write_text(PROGRAM.format(mark=str(mark)))
    run = tmp_path / "run"
    given = ("--method", "dp-sgd", "--noise-multiplier", 1, "--sample-rate", 0.2, "--steps", 3, "--delta", 1e-3)
    assert command("train", "--task", f"{program}:make", *given, "--out", run)[0] == 0
    for name in ("result.json", "model.pt"):
        (run / name).unlink()
    ledger = run / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))  # as if killed before it finished
    mark.unlink()
    code, out, error = command("train", "--resume", run)
    assert (code, out) == (2, "")
    assert f"would run a program that the folder names, {program}:make: read it, then add --trust" in error
    assert not mark.exists()
    assert command("train", "--resume", run, "--trust")[0] == 0
    assert mark.exists()
    assert as_json("verify", run)["verified"]
    assert "--trust cannot be given too" in command("train", "--task", f"{program}:make", *given, "--trust")[2]


def test_a_page_about_crafted_records_is_text(tmp_path):
    """A comparison's strings, in HTML."""
    from pathlib import Path

    from vestige.compare.report import page

    folder = shutil.copytree(Path(__file__).parents[1] / "fixtures" / "written-by-0.1.0" / "comparison", tmp_path / "c")
    from vestige.compare.folder import ComparisonFolder
    from vestige.compare.summary import price_lines, reported_records, summarised

    comparison = ComparisonFolder(folder)
    summary = summarised(comparison)
    content = {
        "title": EVIL,
        "specification": comparison.specification().to_json(),
        "summary": {**summary, "price_lines": price_lines(summary["prices"])},
        "records": reported_records(comparison),
        "paper": None,
    }
    content = json.loads(
        json.dumps(content)
        .replace('"adjacency": "', f'"adjacency": {json.dumps(EVIL)[:-1]}')
        .replace('"detail": "', f'"detail": {json.dumps(EVIL)[:-1]}')
    )
    for record in content["records"]:
        if record["status"] == "done":
            record |= {"lr_reason": EVIL, "assumptions": [EVIL], "reasons": [EVIL]}
            record["run"] |= {"label": EVIL, "task": EVIL, "method": EVIL}
    assert len(content["summary"]["assumptions"]) == len(ASSUMPTIONS)
    assert "<script>alert" not in page.page(content)
