"""The dashboard in Chromium, at a real run that trains meanwhile.

`make test-browser` installs the browser and axe; screenshots are in `.screenshots`.
"""

import gzip
import re
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

import whet
from support.agents.forking_agent import solve, tasks
from support.chromium import CHROMIUM, FLAGS
from support.runs.recorded_run import PAYLOAD, make_folder, record_run
from whet.app.cli.main import main
from whet.app.dashboard.app import FILES, STATIC
from whet.app.dashboard.run_catalog import FolderCatalog
from whet.app.dashboard.serving import Dashboard
from whet.io.threads import run_async
from whet.types import GenerationId

ROOT = Path(__file__).parents[3]
AXE = ROOT / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
SHOTS = ROOT / ".screenshots"
PATIENCE_MS = 60_000
PAGES = ("", "/rollouts", "/queue", "/rewards", "/evaluations", "/resources", "/doctor")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: `make test-browser` installs it"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that failed at times and forked, and a hostile one."""
    directory = tmp_path_factory.mktemp("trained")
    train(directory, "real", steps=2)
    hostile = make_folder(directory, "hostile", PAYLOAD)
    run_async(lambda: record_run(hostile, text=PAYLOAD))
    hostile.save_log_ratios(0, {GenerationId("train-000001-003.1-1.0"): [0.1, -0.5, 0.0]})
    return directory


def train(directory: Path, name: str, *, steps: int, **settings: Any) -> None:
    whet.train(
        solve,
        tasks(8, 0),
        held_out=tasks(4, 1),
        name=name,
        dir=str(directory),
        steps=steps,
        tasks_per_step=4,
        group_size=2,
        quiet=True,
        runner={"max_attempts": 1, "processes": 0},
        algorithm={"logged_keys": ["right", "used_tool"]},
        failure_reward={"agent": 0.0},
        **settings,
    )


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def dashboard(trained: Path) -> Generator[Dashboard]:
    served = Dashboard(FolderCatalog(trained))
    yield served
    served.close()


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Generator[Page]:
    """A signed-in tab, which must not log an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 820}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            errors.append(message.text)

    tab.on("console", note)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(dashboard.create_link())
    expect(tab.locator("tr.row")).to_have_count(2, timeout=PATIENCE_MS)
    yield tab
    assert errors == []
    assert tab.evaluate("window.pwned") is None
    context.close()


def visit(page: Page, path: str, wait: str) -> None:
    page.evaluate("path => { location.hash = path; }", path)
    page.locator(wait).first.wait_for()


def first_rollout(page: Page, query: str) -> str:
    visit(page, f"/r/real/rollouts?{query}", "tr.row")
    expect(page.locator("table")).to_have_attribute("aria-busy", "false", timeout=PATIENCE_MS)
    return page.locator("tr.row a").first.inner_text()


def test_every_page_of_a_run_is_drawn(page: Page) -> None:
    SHOTS.mkdir(exist_ok=True)
    waits = (".chart canvas", "tr.row", ".tile", ".histogram", ".verdict", "table", ".report")
    for path, wait in zip(PAGES, waits, strict=True):
        visit(page, f"/r/real{path}", wait)
        page.screenshot(path=SHOTS / f"{path.strip('/') or 'curves'}.png")


def test_filters_change_the_list_and_the_address(page: Page) -> None:
    visit(page, "/r/real/rollouts", "tr.row")
    page.get_by_label("status").select_option("failed")
    expect(page.locator("tr.row .s-succeeded")).to_have_count(0, timeout=PATIENCE_MS)
    expect(page.locator("tr.row .s-failed").first).to_be_visible()
    assert "status=failed" in page.url
    page.get_by_label("text").fill("no such text anywhere")
    expect(page.get_by_text("No rollout matches.")).to_be_visible(timeout=PATIENCE_MS)
    page.go_back()
    page.keyboard.press("?")
    expect(page.get_by_role("note")).to_contain_text("light or dark")


def test_a_failed_rollout_has_its_traceback(page: Page) -> None:
    rollout = first_rollout(page, "status=failed")
    visit(page, f"/r/real/rollouts/{rollout}", ".failure")
    expect(page.locator(".failure")).to_contain_text("forking_agent.py")


def test_a_token_shows_its_numbers_and_is_colored_by_the_one_that_is_chosen(page: Page) -> None:
    rollout = first_rollout(page, "status=succeeded&mode=train")
    visit(page, f"/r/real/rollouts/{rollout}?view=tokens", ".tokens span.lp0")
    page.locator(".tokens span.lp0").first.hover()
    tip = page.locator(".tip")
    expect(tip).to_contain_text("log-prob")
    expect(tip).to_contain_text("version")
    shades = ".pos0, .pos1, .pos2, .neg0, .neg1, .neg2, .off"
    for mode, kind in (
        ("mask", ".on, .off"),
        ("advantage", shades),
        ("ratio", shades),
        ("version", ".v0"),
    ):
        page.get_by_role("button", name=mode, exact=True).click()
        expect(page.locator(".tokens").locator(kind).first).to_be_visible()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("context")


def test_a_token_is_colored_by_its_ratio(page: Page) -> None:
    path = "/r/hostile/rollouts/train-000001-003?view=tokens&by=ratio"
    visit(page, path, ".tokens span.neg2")
    page.locator(".tokens span.neg2").first.hover()
    expect(page.locator(".tip")).to_contain_text("0.607")
    expect(page.locator(".tokens span.pos1").first).to_be_visible()


def test_a_fork_says_its_cause(page: Page) -> None:
    rollout = first_rollout(page, "status=succeeded&mode=train&forked=true")
    visit(page, f"/r/real/rollouts/{rollout}", ".badge.fork")
    expect(page.locator(".badge.fork").first).to_contain_text("fork: ")
    page.get_by_role("button", name="graph").click()
    expect(page.locator("td .cause").first).to_contain_text(": ")


def test_light_and_dark_differ_and_the_choice_stays(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    visit(page, "/r/real", ".chart canvas")
    light = page.evaluate(background)
    page.keyboard.press("t")
    dark = page.evaluate(background)
    assert light != dark
    page.reload()
    page.locator(".chart canvas").first.wait_for()
    assert page.evaluate(background) == dark


@pytest.mark.skipif(not AXE.exists(), reason="no axe: `make test-browser` installs it")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_has_a_serious_finding_of_axe(page: Page, theme: Any) -> None:
    page.emulate_media(color_scheme=theme)
    rollout = first_rollout(page, "status=succeeded&mode=train")
    views = ("conversation", "tokens", "graph", "spans")
    paths = ["/", *(f"/r/real{path}" for path in PAGES)]
    paths += ["/r/real/rollouts?view=groups", f"/r/real/rollouts?task={rollout}"]
    paths += [f"/r/real/rollouts/{rollout}?view={view}" for view in views]
    page.evaluate(AXE.read_text())
    found: list[str] = []
    for path in paths:
        visit(page, path, "main section, main .empty")
        expect(page.get_by_text("loading…")).to_have_count(0, timeout=PATIENCE_MS)
        result = page.evaluate("() => axe.run(document)")
        found += [
            f"{path}: {each['id']} {each['nodes'][0]['html'][:200]}"
            for each in result["violations"]
            if each["impact"] in ("serious", "critical")
        ]
    assert found == []


def test_a_phone_shows_no_page_wider_than_itself(page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 780})
    for path in PAGES:
        visit(page, f"/r/real{path}", "main section, main .empty")
        expect(page.get_by_text("loading…")).to_have_count(0, timeout=PATIENCE_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, path


def test_planted_scripts_never_run_and_are_shown_as_text(page: Page) -> None:
    for path in PAGES:
        visit(page, f"/r/hostile{path}", "main section, main .empty")
    views = ("conversation", "tokens", "graph", "spans")
    for view in views:
        visit(page, f"/r/hostile/rollouts/train-000000-003?view={view}", ".failure")
        expect(page.locator(".failure")).to_contain_text(PAYLOAD)
    visit(page, "/r/hostile/resources?name=prompt", ".text")
    assert page.locator("main img, main script").count() == 0


def test_a_page_follows_a_run_while_it_trains(browser: Browser, tmp_path: Path) -> None:
    training = threading.Thread(target=train, args=(tmp_path, "live"), kwargs={"steps": 6})
    training.start()
    served = Dashboard(FolderCatalog(tmp_path))
    try:
        until = time.monotonic() + PATIENCE_MS / 1000
        while not (tmp_path / "runs" / "live" / "store.db").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        tab = browser.new_page()
        tab.goto(served.create_link("live"))
        steps = tab.locator(".tile-value").nth(2)
        for text in (re.compile("[1-5] / 6"), "6 / 6"):  # without a reload
            expect(steps).to_have_text(text, timeout=2 * PATIENCE_MS)
        tab.close()
    finally:
        training.join()
        served.close()


def test_a_session_is_asked_for(browser: Browser, dashboard: Dashboard) -> None:
    tab = browser.new_page()
    tab.goto(f"{dashboard.url}/#/r/real")
    expect(tab.get_by_text("Open the link from the terminal")).to_be_visible(timeout=PATIENCE_MS)
    tab.close()


def test_the_html_file_works_without_a_server(
    browser: Browser, trained: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.html"
    assert main(["view", "hostile", "--dir", str(trained), "--html", str(file)]) == 0
    tab = browser.new_page()
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    tab.on("console", note)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(file.as_uri())
    tab.locator(".chart canvas").first.wait_for(timeout=PATIENCE_MS)
    visit(tab, "/r/hostile/rollouts/train-000000-003?view=tokens", ".tokens span")
    assert tab.evaluate("window.pwned") is None
    assert errors == []
    tab.close()


def test_the_first_load_is_below_300_kb_compressed() -> None:
    assert sum(len(gzip.compress((STATIC / name).read_bytes())) for name in FILES) < 300_000
