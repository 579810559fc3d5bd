"""One browser for the session, and a server for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from web_campus import Campus, make_campus
from web_pages import Pages, serve

from grader.db import Database

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for the session; each test begins without cookies."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # the path is given, so that selenium looks for nothing to download
    driver = Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def campus(sqlite_database: Database, tmp_path: Path) -> Campus:
    """The browser sees no difference between the databases, so one is enough."""
    return make_campus(sqlite_database, tmp_path / "data")


@pytest.fixture
def pages(chrome: Chrome, campus: Campus) -> Iterator[Pages]:
    with serve(campus.app) as base:
        chrome.delete_all_cookies()
        yield Pages(driver=chrome, base=base)
        chrome.get("about:blank")  # ends streams, so that the server can close
        chrome.get_log("browser")
