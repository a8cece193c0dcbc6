"""The page of a book in a real browser: drawn, readable, sortable, silent and offline."""

import html
import json
import re
import shutil
import subprocess

import pytest

from vestige.budget import Book, terms, usual
from vestige.cli.books.page import page

RUN = usual(0.01, 1.2, 1000)
LOOK = """<script>
const complaints = [];
addEventListener("error", event => complaints.push(event.message));
addEventListener("load", () => {
  const box = each => each.getBoundingClientRect();
  const all = query => [...document.querySelectorAll(query)];
  const button = all("#table-runs th button").find(each => each.textContent.includes("person"));
  button.click();
  const found = {
    figures: all("figure > svg").map(each => box(each).height),
    labels: all("figure text").map(each => [box(each).left, box(each).right]),
    rows: Object.fromEntries(all("table").map(each => [each.id, each.tBodies[0].rows.length])),
    people: all("#table-runs tbody tr").map(each => each.cells[1].textContent),
    runs: document.querySelector("#table-runs").textContent,
    wide: [document.documentElement.scrollWidth, innerWidth],
    fetched: performance.getEntriesByType("resource").map(each => each.name),
    complaints,
  };
  document.body.dataset.found = JSON.stringify(found);
});
</script>"""


@pytest.fixture
def spent(tmp_path):
    """Three people, five runs, an entry by hand, and a reservation that waits."""
    book = Book.create(tmp_path / "book", terms(5.0, 1e-5, expect=RUN, parts=("north", "south")))
    for number, (person, part) in enumerate([("bob", ""), ("ann", "north"), ("cy", "south"), ("ann", ""), ("bob", "")]):
        name = book.reserve(RUN, purpose=f"train <b>{number}</b>", by=person, part=part)
        book.charge(name, RUN)
        book.close(name)
    book.enter(0.1, 0.0, "a count, with another tool", by="cy")
    book.reserve(usual(0.01, 2.0, 500), purpose="waits", by="cy", held=False)
    return Book(book.path, whole=True)


def test_in_a_browser(spent, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    path = tmp_path / "book.html"
    path.write_text(page(spent).replace("<head>", f"<head>{LOOK}", 1), encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1000,1400",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    told = re.search(r'data-found="([^"]*)"', shown)
    assert told is not None, shown[:2000]
    found = json.loads(html.unescape(told[1]))
    assert len(found["figures"]) == 2
    assert min(found["figures"]) > 30
    assert min(left for left, _ in found["labels"]) >= 0
    assert max(right for _, right in found["labels"]) <= 1000, "no label is cut off"
    assert found["rows"] == {"table-people": 3, "table-runs": 6, "table-hand": 1, "table-parts": 2}
    assert found["people"] == sorted(found["people"]), "a click sorts"
    assert "train <b>0</b>" in found["runs"], "what people wrote is text"
    assert found["wide"][0] <= found["wide"][1], "nothing runs out of the window"
    assert found["fetched"] == found["complaints"] == []
