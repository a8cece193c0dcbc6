"""Which assumptions does a surface print? Read from ledgers, JSON, cards and the lines of a terminal."""

from __future__ import annotations

import re

from vestige.accounting.ledger import read
from vestige.assumptions import ASSUMPTIONS, STATUSES
from vestige.training.verify import reprice


def in_ledger(path, delta=None):
    """Name, status and detail of every assumption, by the ledger alone."""
    history = read(path)
    spent = history.spent(replays_are_free=history.facts["noise"] == "seeded")
    promise = reprice(spent, delta or history.facts["delta"], history.facts, history.assumptions)
    return {each.name: (each.status, each.detail) for each in promise.assumptions}


def listed(content):
    assert [each["name"] for each in content] == list(ASSUMPTIONS)
    for each in content:
        assert each["sentence"] == ASSUMPTIONS[each["name"]].sentence
        assert each["if_false"] == ASSUMPTIONS[each["name"]].if_false
    return {each["name"]: (each["status"], each["detail"]) for each in content}


def in_card(page):
    """By the table of a card."""
    titles = {each.title.lower(): each.name for each in ASSUMPTIONS.values()}
    found = {}
    for title, status, detail in re.findall(
        r"^\| ([^|]+) \| (checked|assumed|not needed)(?: \((.*?)\))? \|", page, re.M
    ):
        found[titles[title.lower()]] = (status, detail)
    return found


def in_terminal(out):
    """By the lines of a command, wherever the console has broken them."""
    words = " ".join(out.split())
    found = {}
    for status in STATUSES:
        for each in ASSUMPTIONS.values():
            if status == "assumed":
                shown = each.title + ": " + each.sentence in words
            else:
                shown = bool(re.search(rf"{status}:? ((?!not needed)[^:])*{re.escape(each.title)}", words))
            if shown:
                found[each.name] = status
    return found
