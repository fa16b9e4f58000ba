"""A page in a real browser.

Without a browser the tests are skipped with one line; with GRADLIFT_REQUIRE_BROWSER=1 they fail.
"""

import os
import shutil
import time

import pytest

from gradlift.report import page as _html

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def missing():
    """What keeps the tests from running, None if nothing does."""
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser found ({', '.join(BROWSERS)})"
    try:
        import axe_playwright_python  # noqa: F401
        import playwright  # noqa: F401
    except ImportError as error:
        return f"the Python package {error.name} is not installed"
    return None


@pytest.fixture(scope="session")
def browser(request):
    lacking = missing()
    if lacking and os.environ.get("GRADLIFT_REQUIRE_BROWSER") == "1":
        pytest.fail(f"GRADLIFT_REQUIRE_BROWSER=1, but {lacking}")
    if lacking:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"tests/browser skipped: {lacking}")
        pytest.skip(lacking)
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """One look at a page, and all that it did: messages, errors, dialogs, requests."""

    def __init__(self, browser, path, place="", **context):
        settings = {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"}
        self.context = browser.new_context(**settings | context)
        self.page = self.context.new_page()
        self.trouble, self.requests = [], []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", self.dialog)
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.address = path.as_uri()
        self.page.goto(self.address + place)
        self.until("document.documentElement.dataset.charts !== undefined")

    def dialog(self, dialog):
        self.trouble.append(dialog.message)
        dialog.dismiss()

    def count(self, selector):
        return self.page.locator(selector).count()

    def fits(self):
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def until(self, expression):
        """Ask again and again from outside: the page's policy forbids it to evaluate a string."""
        end = time.monotonic() + 30
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            self.page.wait_for_timeout(20)

    def names(self):
        """The table's visible names, from top to bottom."""
        return self.page.locator("#parameters tbody tr:visible td:first-child").all_inner_texts()

    def unfold(self, heading):
        self.page.locator("summary", has_text=heading).first.click()

    def sort_by(self, head):
        self.page.locator("#parameters thead button", has_text=head).click()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a run's page; at the end, nothing may have been said or asked for."""
    made = []

    def open_(run, findings=(), place="", **context):
        path = tmp_path / "report.html"
        text = run if isinstance(run, str) else _html.report(run, findings)
        path.write_text(text, encoding="utf-8")
        made.append(Visit(browser, path, place, **context))
        return made[-1]

    yield open_
    for each in made:
        inside = (each.address, "data:", "blob:")
        outside = [u for u in each.requests if not u.startswith(inside)]
        each.context.close()
        assert each.trouble == []
        assert outside == []
