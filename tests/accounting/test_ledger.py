"""Does the ledger come before the answer, and does any tampering show?"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from torch import nn

import vestige
from conftest import make_toy
from vestige import accounting
from vestige.accounting.ledger import Ledger, LedgerError, read
from vestige.priced_questions import BudgetSpent, SampledGaussian
from vestige.training.verify import verify

QUESTION = SampledGaussian(0.1, 1.0)


@pytest.fixture
def finished(tmp_path):
    model, data = make_toy()
    training = vestige.train(
        model,
        nn.functional.cross_entropy,
        data,
        epsilon=4.0,
        delta=1e-5,
        sample_rate=0.2,
        steps=12,
        out=tmp_path / "run",
    )
    for _ in training:
        pass
    return tmp_path / "run"


def lines(run):
    return (run / "ledger.jsonl").read_text().splitlines(keepends=True)


def rewrite(run, rows):
    (run / "ledger.jsonl").write_text("".join(rows))


def test_epsilon_follows_from_the_ledger_alone(finished):
    verdict = verify(finished)
    facts = json.loads(lines(finished)[0])
    expected = accounting.epsilon({SampledGaussian(0.2, facts["noise_multiplier"]): 12}, 1e-5)
    assert verdict.guarantee.epsilon == expected
    assert verdict.asked == 12


def edit(key, value):
    def change(rows):
        asked = next(place for place, row in enumerate(rows) if json.loads(row).get("step") == 2)
        row = json.loads(rows[asked])
        row[key] = value
        return [*rows[:asked], json.dumps(row) + "\n", *rows[asked + 1 :]]

    return change


def sealed(change):
    """An edit of one row that is hashed anew, and none of the rows after it."""

    def changed(rows):
        edited = change(rows)
        return [new if old != each else old for old, each, new in zip(rows, edited, rechain(edited), strict=True)]

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("multiplier", 100.0), "edited"),
        (edit("rate", 0.01), "edited"),
        (edit("step", 3), "edited"),
        (sealed(edit("multiplier", 100.0)), "does not follow the line before it"),
        (lambda rows: [*rows[:5], *rows[6:]], "gap"),
        (lambda rows: [*rows[:6], rows[5], *rows[6:]], "gap|follow"),
        (lambda rows: [*rows[:5], rows[6], rows[5], *rows[7:]], "gap|follow"),
        (lambda rows: rows[:-3], "cut or replaced"),
        (lambda rows: rows[1:], "gap|open"),
        (lambda rows: [*rows[:-1], rows[-1][:40]], "torn"),
        (lambda rows: [*rows, "{}\n"], "gap|hash|follow"),
        (lambda rows: [*rows[:4], "nonsense\n", *rows[4:]], "not JSON"),
        (lambda rows: [], "empty"),
    ],
)
def test_every_tampering_is_found(finished, change, message):
    rewrite(finished, change(lines(finished)))
    with pytest.raises(LedgerError, match=message):
        verify(finished)


def rechain(rows):
    """What a careful forger would do: fix all hashes after the edit."""
    from vestige.accounting.ledger import GENESIS, _seal

    head, out = GENESIS, []
    for number, line in enumerate(rows):
        row = {k: v for k, v in json.loads(line).items() if k != "hash"} | {"previous": head, "seq": number}
        head = _seal(row)
        out.append(json.dumps({**row, "hash": head}) + "\n")
    return out


def test_a_consistently_forged_ledger_no_longer_matches_the_run(finished):
    rewrite(finished, rechain(edit("multiplier", 100.0)(lines(finished))))
    with pytest.raises(LedgerError, match="cut or replaced"):
        verify(finished)


def test_a_reuse_or_a_gap_of_steps_is_found_even_with_sound_hashes(finished):
    first = next(place for place, row in enumerate(lines(finished)) if json.loads(row)["row"] == "ask")
    for place in (first + 1, first + 3):
        rows = lines(finished)
        row = json.loads(rows[first + 2])
        row["step"] = json.loads(rows[place])["step"]
        rewrite(finished, rechain([*rows[: first + 2], json.dumps(row) + "\n", *rows[first + 3 :]]))
        with pytest.raises(LedgerError, match="a gap or a reuse"):
            read(finished / "ledger.jsonl")
        rewrite(finished, rows)


def test_every_row_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced, sync = [], "fdatasync" if hasattr(os, "fdatasync") else "fsync"
    monkeypatch.setattr(os, sync, lambda handle: synced.append(os.fstat(handle).st_size))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open({})
    ledger.ask(QUESTION, step=0, part=0, sensitivity=1.0)
    assert (tmp_path / "ledger.jsonl").stat().st_size == synced[-1] > synced[0] > 0
    ledger.close()


def test_the_question_is_durable_before_the_answer_exists(tmp_path, monkeypatch):
    model, data = make_toy()
    run = tmp_path / "run"
    training = vestige.train(
        model,
        nn.functional.cross_entropy,
        data,
        noise_multiplier=1.0,
        delta=1e-5,
        sample_rate=0.2,
        steps=3,
        lr=0.1,
        out=run,
    )
    seen = []
    noise = training.curator._noise
    honest = noise.add
    monkeypatch.setattr(noise, "add", lambda *a, **k: (seen.append(len(lines(run))), honest(*a, **k))[1])
    list(training)
    opened = 1 + len(training.ledger.assumptions)
    assert seen == [opened, opened + 1, opened + 2]  # the last assumption is known after the last step


class Refuses:
    def allows(self, spent, question):
        return sum(spent.values()) < 2


def test_a_refused_question_leaves_no_trace(tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl", Refuses())
    ledger.open({})
    for step in range(2):
        ledger.ask(QUESTION, step=step, part=0, sensitivity=1.0)
    with pytest.raises(BudgetSpent):
        ledger.ask(QUESTION, step=2, part=0, sensitivity=1.0)
    assert ledger.spent == {QUESTION: 2}
    assert len((tmp_path / "l.jsonl").read_text().splitlines()) == 3


def test_a_full_disk_loses_nothing_and_asks_nothing(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "l.jsonl")
    ledger.open({})
    ledger.ask(QUESTION, step=0, part=0, sensitivity=1.0)
    before = (tmp_path / "l.jsonl").read_bytes()
    honest = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: honest(fd, bytes(data)[:20]))
    with pytest.raises(OSError, match="nothing was asked"):
        ledger.ask(QUESTION, step=1, part=0, sensitivity=1.0)
    monkeypatch.undo()
    assert (tmp_path / "l.jsonl").read_bytes() == before
    assert ledger.spent == {QUESTION: 1}
    ledger.ask(QUESTION, step=1, part=0, sensitivity=1.0)
    assert read(tmp_path / "l.jsonl").asks == {QUESTION: 2}


def test_a_resumed_step_is_charged_again_and_may_not_skip(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path)
    ledger.open({})
    for step in range(5):
        ledger.ask(QUESTION, step=step, part=0, sensitivity=1.0)
    again = Ledger(path)
    again.resume(from_step=3)
    assert again.spent == {QUESTION: 5}
    again.ask(QUESTION, step=3, part=0, sensitivity=1.0)
    assert read(path).asks == {QUESTION: 6}
    assert read(path).spent(replays_are_free=False) == {QUESTION: 6}
    assert read(path).spent(replays_are_free=True) == {QUESTION: 5}  # of a seed, the same answer again
    skipping = Ledger(path)
    skipping.resume(from_step=9)
    with pytest.raises(LedgerError, match="cannot follow"):
        read(path)


def test_a_torn_line_is_cut_off_on_resume_only(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path)
    ledger.open({})
    ledger.ask(QUESTION, step=0, part=0, sensitivity=1.0)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq": 2, "prev')
    with pytest.raises(LedgerError, match="torn"):
        read(path)
    again = Ledger(path)
    again.resume(from_step=1)
    assert again.spent == {QUESTION: 1}
    assert path.read_bytes().startswith(whole)
    read(path)


def test_several_questions_in_a_step_are_numbered(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path)
    ledger.open({})
    for step in range(2):
        for part in range(2):
            ledger.ask(QUESTION, step=step, part=part, sensitivity=1.0)
    assert read(path).asks == {QUESTION: 4}
    ledger.ask(QUESTION, step=2, part=1, sensitivity=1.0)
    with pytest.raises(LedgerError, match="step 2, part 1"):
        read(path)


def test_the_folder_copied_elsewhere_still_verifies(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    assert verify(tmp_path / "copy").asked == 12


# --- one process writes ----------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from vestige.accounting.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.resume(0)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_never_continue_one_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    first.open({"noise": "secret"})
    first.close()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="in use: another process continues this run"):
        Ledger(path).resume(0)
    assert read(path).attempts == 2  # reading, as verify does, disturbs nobody
    other.communicate("")
    Ledger(path).resume(0)


def test_a_later_call_of_one_process_takes_the_ledger_over(tmp_path):
    """As in a notebook: the interrupted run is still in a variable when the cell is run again."""
    first = Ledger(tmp_path / "ledger.jsonl")
    first.open({"noise": "secret"})
    first.ask(QUESTION, step=0, part=0, sensitivity=1.0)
    second = Ledger(tmp_path / "ledger.jsonl")
    second.resume(1)
    assert second.spent == first.spent
    with pytest.raises(LedgerError, match="closed"):
        first.ask(QUESTION, step=1, part=0, sensitivity=1.0)


def test_a_ledger_is_never_begun_over_another(tmp_path):
    Ledger(tmp_path / "ledger.jsonl").open({"noise": "secret"})
    with pytest.raises(ValueError, match="exists"):
        Ledger(tmp_path / "ledger.jsonl").open({"noise": "secret"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_writes_no_row_of_its_parents_ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open({"noise": "secret"})
    child = os.fork()
    if child == 0:
        try:
            ledger.ask(QUESTION, step=0, part=0, sensitivity=1.0)
        except LedgerError as refused:
            os._exit(7 if "forked" in str(refused) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ledger.ask(QUESTION, step=0, part=0, sensitivity=1.0)
    assert read(ledger.path).asks == {QUESTION: 1}


def test_two_ledgers_of_the_same_questions_have_no_row_in_common(tmp_path):
    for name in ("one", "other"):
        ledger = Ledger(tmp_path / name)
        ledger.open({"noise": "secret"})
        ledger.ask(QUESTION, step=0, part=0, sensitivity=1.0)
        ledger.close()
    one, other = (read(tmp_path / name) for name in ("one", "other"))
    assert one.asks == other.asks
    assert not set(one.heads) & set(other.heads)


def test_a_ledger_that_could_not_be_begun_leaves_no_file(tmp_path, monkeypatch):
    def full(file, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="nothing was asked"):
        Ledger(tmp_path / "ledger.jsonl").open({"noise": "secret"})
    monkeypatch.undo()
    Ledger(tmp_path / "ledger.jsonl").open({"noise": "secret"})


def test_a_ledger_in_memory_has_the_head_of_one_that_is_written(tmp_path):
    one, other = SampledGaussian(0.2, 1.0), SampledGaussian(0.2, 1)
    asked = [
        (one, 0, 0, 1.0),
        (one, 1, 0, 1.0),
        (other, 2, 0, 1.0),
        (other, 2, 1, 1),
        (one, 3, 0, 0.5),
        (one, 4, 0, -0.0),
    ]
    heads = []
    for path in (None, tmp_path / "ledger.jsonl"):
        ledger = Ledger(path, replays_are_free=True)  # such a run repeats itself, and its ledger has no name
        ledger.open({"what": "\0seq"})
        for question, step, part, sensitivity in asked:
            ledger.ask(question, step=step, part=part, sensitivity=sensitivity)
        heads.append((ledger.head, ledger.rows))
        ledger.close()
    assert heads[0] == heads[1]
