"""Is an assumption recorded once, hashed with the ledger, and counted as assumed where nobody recorded it?"""

import json
from threading import Barrier, Thread

import pytest

from vestige.accounting.ledger import Ledger, LedgerError, read
from vestige.assumptions import ASSUMPTIONS, STATUSES, Stated, lines, merged, record, stated
from vestige.priced_questions import SampledGaussian
from vestige.processes.ledger import SharedLedger

FACTS = {"noise": "secret", "delta": 1e-5}


def opened(tmp_path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open(FACTS)
    return ledger


def test_what_is_recorded_is_read_back_and_hashed(tmp_path):
    ledger = opened(tmp_path)
    record(ledger, "loss_per_example", "checked", "taken of one example at a time")
    ledger.ask(SampledGaussian(0.1, 1.0), step=0, part=0, sensitivity=1.0)
    record(ledger, "padding", "not needed")
    ledger.finish({})
    history = read(ledger.path)
    assert history.assumptions == ledger.assumptions
    assert history.assumptions["loss_per_example"].detail == "taken of one example at a time"
    assert history.head == ledger.head
    assert history.rows == ledger.rows == 5


def test_the_same_record_again_writes_nothing(tmp_path):
    ledger = opened(tmp_path)
    for _ in range(3):
        record(ledger, "padding", "checked", "once")
    assert ledger.rows == 2


def test_the_weakest_record_counts(tmp_path):
    ledger = opened(tmp_path)
    for status in ("not needed", "checked", "assumed", "checked", "not needed"):
        record(ledger, "padding", status)
    assert ledger.assumptions["padding"].status == "assumed"
    assert ledger.rows == 4
    assert read(ledger.path).assumptions["padding"].status == "assumed"


def test_details_of_one_status_are_kept_once_each():
    both = merged(merged(Stated("key", "checked", "a"), Stated("key", "checked", "b")), Stated("key", "checked", "a"))
    assert both.detail == "a; b"


def test_a_resumed_ledger_knows_what_was_recorded(tmp_path):
    first = opened(tmp_path)
    record(first, "padding", "assumed", "rows of several lengths")
    first.close()
    again = Ledger(tmp_path / "ledger.jsonl")
    again.resume(0)
    assert again.assumptions == first.assumptions


@pytest.mark.parametrize(
    ("name", "status", "detail"),
    [
        ("padded", "checked", ""),
        ("padding", "true", ""),
        ("nothing_fitted", "checked", ""),
        ("nothing_fitted", "not needed", ""),
        ("padding", "checked", "two\nlines"),
    ],
)
def test_what_is_not_in_the_closed_list_is_refused(tmp_path, name, status, detail):
    ledger = opened(tmp_path)
    with pytest.raises(ValueError, match="assumption"):
        record(ledger, name, status, detail)
    ledger._append({"row": "assumption", "name": name, "status": status, "detail": detail})
    with pytest.raises(LedgerError, match="line 2"):
        read(ledger.path)


def test_an_edited_assumption_breaks_the_chain(tmp_path):
    ledger = opened(tmp_path)
    record(ledger, "padding", "assumed")
    text = ledger.path.read_text().replace('"assumed"', '"checked"')
    ledger.path.write_text(text)
    with pytest.raises(LedgerError, match="edited"):
        read(ledger.path)


def test_what_is_not_recorded_counts_as_assumed():
    whole = stated({"padding": Stated("padding", "checked")})
    assert [each.name for each in whole] == list(ASSUMPTIONS)
    assert {each.name for each in whole if each.status != "assumed"} == {"padding"}
    assert json.dumps([each.to_json() for each in whole])
    shown = lines([each.to_json() for each in whole])
    assert shown[-1] == "checked: padding is ignored"
    assert len(shown) == len(ASSUMPTIONS)


def test_every_assumption_says_what_breaks():
    for each in ASSUMPTIONS.values():
        assert each.sentence
        assert each.if_false
        assert each.title
        assert "assumed" in each.statuses
        assert set(each.statuses) <= set(STATUSES)


class Pair:
    """Two processes as two threads."""

    def __init__(self, rank, shared):
        self.rank, self.shared = rank, shared

    def first(self, work):
        return work()

    def told(self, *numbers):
        heard, barrier = self.shared
        heard[self.rank] = list(numbers)
        barrier.wait(10)
        found = [heard[0], heard[1]]
        barrier.wait(10)
        return found


def test_processes_write_the_weakest_of_what_each_knows():
    shared = ({}, Barrier(2))
    ledgers = [SharedLedger(Pair(rank, shared), None) for rank in range(2)]

    def work(rank):
        ledger = ledgers[rank]
        ledger.open(FACTS)
        record(ledger, "key", "checked", "one key for all")
        ledger.ask(SampledGaussian(0.1, 1.0), step=0, part=0, sensitivity=1.0)
        record(ledger, "padding", ("checked", "assumed")[rank])
        ledger.ask(SampledGaussian(0.1, 1.0), step=1, part=0, sensitivity=1.0)
        ledger.ask(SampledGaussian(0.1, 1.0), step=2, part=0, sensitivity=1.0)

    threads = [Thread(target=work, args=(rank,)) for rank in range(2)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert ledgers[0].head == ledgers[1].head
    assert ledgers[0].rows == 6
    for ledger in ledgers:
        assert {name: each.status for name, each in ledger.assumptions.items()} == {
            "key": "checked",
            "padding": "assumed",
        }
        assert ledger.assumptions["key"].detail == "one key for all"
