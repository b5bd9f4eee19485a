"""The page of `fedloom ui` in a real browser: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_processes import started
from ui_support import ROUNDS, shown, trained

pytestmark = [pytest.mark.group("ui"), pytest.mark.exhaustive]

WAIT_MS = 240_000  # generous: a test machine may be busy with other things


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("ui"))


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with shown(runs) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open a page that fails the test if it requests another host, or a script of its own is refused or fails."""
    problems: list[str] = []
    options = getattr(request, "param", {})
    context = browser.new_context(base_url=address, **options)
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    opened.on("request", lambda asked: asked.url.startswith((address, "data:")) or problems.append(asked.url))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda said: said.type == "error" and problems.append(said.text))
    yield opened
    context.close()
    assert problems == []


def test_a_run_that_starts_appears_and_moves_on_while_it_is_watched(page: Any, runs: Path) -> None:
    page.goto("/")
    row = page.locator('tr[data-key="new"]')
    assert row.count() == 0
    page.locator('tr[data-key="avg"] input').check()
    with started("run", runs.parent / "experiment.yaml", "--out", runs / "new", "--set", "federation.rounds=100000"):
        row.get_by_text("running").wait_for()
        row.locator('progress:not([value="0"])').wait_for()
        assert page.locator('tr[data-key="avg"] input').is_checked()
        row.locator("a").click()
        page.locator('#progress progress:not([value="0"], [value="1"])').wait_for()
        page.locator("#section-learning-curves svg").first.wait_for()
    page.get_by_text("interrupted", exact=True).wait_for()
    page.goto("/")
    shutil.rmtree(runs / "new")
    row.wait_for(state="detached")


@pytest.mark.parametrize(
    "page",
    [{"viewport": {"width": 360, "height": 740}, "color_scheme": scheme} for scheme in ("light", "dark")],
    indirect=True,
    ids=["light", "dark"],
)
def test_every_page_fits_a_phone_and_follows_its_colours(page: Any, request: pytest.FixtureRequest) -> None:
    backgrounds = set()
    for path in ("/", "/run/sub/private", "/report/avg", "/client/avg?id=client-0001", "/compare?run=avg&run=ditto"):
        page.goto(path)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 360, path
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    dark = "dark" in request.node.callspec.id
    assert backgrounds == {"rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)"}


def test_the_keyboard_filters_ticks_and_compares(page: Any) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    page.keyboard.type("vowel -nothing")
    page.get_by_text("No run has these words.").wait_for()
    page.locator("#q").fill("seed:1")
    page.locator('tr[data-key="ditto"]').wait_for()
    for name in ("avg", "ditto"):
        page.locator(f'tr[data-key="{name}"] input').focus()
        page.keyboard.press("Space")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator("#compare").focus()
    assert page.locator("#compare").inner_text() == "Compare 2 runs"
    page.keyboard.press("Enter")
    page.locator("#section-learning-curves svg").first.wait_for()
    assert page.url.endswith("/compare?run=ditto&run=avg") or page.url.endswith("/compare?run=avg&run=ditto")


def test_links_lead_into_reports_and_to_clients(page: Any) -> None:
    page.goto("/report/avg#section-settings")
    assert page.locator("#section-settings").bounding_box()["y"] < 740
    page.get_by_role("link", name="Back to the run").click()
    page.get_by_role("link", name="client-0004").first.click()
    page.get_by_role("heading", name="client-0004").wait_for()
    page.get_by_role("link", name="ditto").click()
    page.get_by_role("link", name="Back to the run").click()
    assert page.url.endswith("/run/ditto")
    assert page.locator("#progress progress").get_attribute("value") == str(ROUNDS)


@pytest.mark.parametrize("page", [{"java_script_enabled": False}], indirect=True, ids=["no scripts"])
def test_the_page_works_without_scripts(page: Any) -> None:
    page.goto("/")
    page.locator("#q").fill("ditto")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?q=ditto")
    assert page.locator("tr[data-key]").count() == 1
    page.locator('tr[data-key="ditto"] input').check()
    page.locator("#compare").click()
    page.get_by_role("heading", name="Results").wait_for()
