"""The page in a real browser: drawn, sortable, filterable, silent and offline."""

import csv
import shutil

import pytest

from comparisons import one_cell
from vestige.compare.report import figures
from vestige.compare.report import page as report

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        profile = tmp_path_factory.mktemp("profile")
        context = driver.chromium.launch_persistent_context(str(profile), executable_path=chromium, args=FLAGS)
        yield context
        context.close()


@pytest.mark.slow
def test_in_a_browser(browser, content, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report.page(content), encoding="utf-8")
    page = browser.new_page()
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())

    assert page.locator("figure > svg").count() == len(figures.figures(content))
    boxes = page.eval_on_selector_all("figure > svg", "all => all.map(s => s.getBoundingClientRect().height)")
    assert min(boxes) > 60
    marks = page.eval_on_selector_all("g.s", "all => all.map(g => g.getBBox().width + g.getBBox().height)")
    assert min(marks) > 0

    table = page.locator("#table-runs")
    column = page.locator("#table-runs th").all_text_contents().index("accuracy")
    head = table.locator("th").nth(column).locator("button")

    def values():
        return page.eval_on_selector_all(
            "#table-runs tbody tr:not(.hidden)", f"rows => rows.map(r => r.cells[{column}].dataset.v)"
        )

    head.click()
    rising = [float(value) for value in values() if value]
    assert rising == sorted(rising)
    head.click()
    falling = [float(value) for value in values() if value]
    assert falling == sorted(rising, reverse=True)
    assert values()[-1] == ""  # failed runs have no accuracy and stay at the end

    search = page.locator("input[data-table=table-runs]")
    search.fill("fo tuned")
    assert 0 < len(values()) < len(content["records"])
    assert all("tuned" in text for text in page.locator("#table-runs tbody tr:not(.hidden)").all_text_contents())
    with page.expect_download() as waiting:
        page.locator(".csv[data-table=table-runs]").click()
    saved = tmp_path / "runs.csv"
    waiting.value.save_as(saved)
    with open(saved, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["accuracy"] for row in rows] == values()
    records = {row["run"]: row for row in report._run_table(content)}
    for row in rows:
        for name, value in records[row["run"]].items():
            exact = float(row[name]) if isinstance(value, float) else row[name]
            assert exact == (value if isinstance(value, float) else "" if value is None else str(value))
    search.fill("no such thing")
    assert values() == []

    chip = page.locator(".chip[data-series=fo]")
    chip.click()
    assert page.locator("g.s[data-series=fo]:visible").count() == 0
    assert page.locator("g.s[data-series=dp-sgd]:visible").count() > 0
    chip.click()
    assert page.locator("g.s[data-series=fo]:visible").count() > 0

    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests), requests
    page.close()


def test_methods_named_on_request_always_stand_on_a_line_of_their_own(browser, content, tmp_path):
    same = {f"method-{i}": (0.001 * i, -0.01, 0.01, "not distinguishable") for i in range(8)}
    path = tmp_path / "report.html"
    words = report._findings(one_cell(same)) + report._findings(
        one_cell({**same, "bad": (-0.1, -0.11, -0.09, "worse")})
    )
    path.write_text(report.page(content).replace("</main>", f"<div id='here'>{words}</div></main>"), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        places = page.eval_on_selector_all(
            "#here details",
            """all => all.map(each => {
                const before = document.createRange();
                before.setStart(each.parentElement, 0);
                before.setEndBefore(each);
                const [own, whole] = [each.getBoundingClientRect(), each.parentElement.getBoundingClientRect()];
                return [own.left - whole.left, own.top - before.getBoundingClientRect().bottom];
            })""",
        )
        assert len(places) == 2
        assert all(left == pytest.approx(0, abs=1) and above > -4 for left, above in places)
    page.close()
