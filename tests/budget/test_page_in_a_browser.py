"""The page of a book in a real browser: drawn, readable, sortable, silent and offline."""

import shutil

import pytest

from vestige.budget import Book, terms, usual
from vestige.cli.books.page import page

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
RUN = usual(0.01, 1.2, 1000)


@pytest.fixture
def browser(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(tmp_path / "profile"), executable_path=chromium, args=FLAGS
        )
        yield context
        context.close()


@pytest.fixture
def spent(tmp_path):
    """Three people, five runs, an entry by hand, and a reservation that waits."""
    book = Book.create(tmp_path / "book", terms(5.0, 1e-5, expect=RUN, parts=("north", "south")))
    for number, (person, part) in enumerate([("ann", ""), ("bob", "north"), ("cy", "south"), ("ann", ""), ("bob", "")]):
        name = book.reserve(RUN, purpose=f"train <b>{number}</b>", by=person, part=part)
        book.charge(name, RUN)
        book.close(name)
    book.enter(0.1, 0.0, "a count, with another tool", by="cy")
    book.reserve(usual(0.01, 2.0, 500), purpose="waits", by="cy", held=False)
    return Book(book.path, whole=True)


@pytest.mark.slow
def test_in_a_browser(browser, spent, tmp_path):
    path = tmp_path / "book.html"
    path.write_text(page(spent), encoding="utf-8")
    shown = browser.new_page(viewport={"width": 1000, "height": 1400})
    complaints, requests = [], []
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("request", lambda request: requests.append(request.url))
    shown.goto(path.as_uri())
    assert shown.locator("figure > svg").count() == 2
    boxes = shown.eval_on_selector_all("figure > svg", "all => all.map(s => s.getBoundingClientRect().height)")
    assert min(boxes) > 30
    texts = shown.eval_on_selector_all(
        "figure text", "all => all.map(t => [t.getBoundingClientRect().left, t.getBoundingClientRect().right])"
    )
    assert min(left for left, _ in texts) >= 0
    assert max(right for _, right in texts) <= 1000, "no label is cut off"
    for table, count in (("people", 3), ("runs", 6), ("hand", 1), ("parts", 2)):
        assert shown.locator(f"#table-{table} tbody tr").count() == count, table
    assert "train <b>0</b>" in shown.locator("#table-runs").text_content()
    shown.locator("#table-runs th button", has_text="person").click()
    people = shown.eval_on_selector_all("#table-runs tbody tr", "rows => rows.map(r => r.cells[1].textContent)")
    assert people == sorted(people)
    width = shown.evaluate("document.documentElement.scrollWidth")
    assert width <= 1000, "nothing runs out of the window"
    assert [url for url in requests if not url.startswith("file:")] == []
    assert complaints == []
    shown.screenshot(path=tmp_path / "book.png", full_page=True)
