"""What are the reports of these tests about? One small comparison, made once."""

import pytest

from comparisons import SMALL, files
from vestige.compare import runner
from vestige.compare.folder import ComparisonFolder
from vestige.compare.summary import price_lines, summarised


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return runner.compare(tmp_path_factory.mktemp("comparison") / "c", SMALL).path


@pytest.fixture(scope="session")
def content(folder):
    home = ComparisonFolder(folder)
    summary = summarised(home)
    summary["price_lines"] = price_lines(summary["prices"])
    records = list(files(home).values())
    return {"title": "A <test> & more", "specification": SMALL.to_json(), "summary": summary, "records": records}
