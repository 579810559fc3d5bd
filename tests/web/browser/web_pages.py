"""What a journey through the pages is made of: a real server, and steps in a real browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flask import Flask
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from waitress.server import create_server
from web_campus import COURSE, PASSWORD, ROOT, SLUG

from grader.web import SERVER_OPTIONS

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
SHOTS = ROOT / "artifacts" / "screenshots"
WAIT_S = 15.0

Tour = dict[str, dict[str, str]]  # by person, then by the name of the picture: the path of a page


def start_chromium(folder: Path) -> Chrome:
    """A browser without a window, whose profile lies in `folder`. Quit it."""
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
        f"--user-data-dir={folder}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # the path is given, so that selenium looks for nothing to download
    return Chrome(options=options, service=Service(str(DRIVER)))


@dataclass(frozen=True)
class Pages:
    """The steps of a journey, for any server that the browser can reach."""

    driver: Chrome
    base: str

    def open(self, path: str) -> None:
        self.driver.get(self.base + path)

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def buttons(self) -> list[str]:
        return [button.text for button in self.driver.find_elements(By.CSS_SELECTOR, "main button")]

    def text(self) -> str:
        return self.find("main").text

    def wait_for(self, css: str, timeout_s: float = WAIT_S) -> WebElement:
        return WebDriverWait(self.driver, timeout_s, poll_frequency=0.05).until(
            lambda driver: driver.find_element(By.CSS_SELECTOR, css), f"nothing fits {css}"
        )

    def wait_for_text(self, text: str, timeout_s: float = WAIT_S) -> None:
        # what is live may be replaced between finding it and reading it
        gone = [StaleElementReferenceException]
        WebDriverWait(self.driver, timeout_s, poll_frequency=0.05, ignored_exceptions=gone).until(
            lambda driver: text in driver.find_element(By.TAG_NAME, "main").text, f"the page never said {text!r}"
        )

    def log_in(self, name: str, password: str) -> None:
        self.open("/log-in")
        self.find("#name").send_keys(name)
        self.find("#password").send_keys(password)
        self.find("main button").click()
        self.wait_for(".who")

    def log_out(self) -> None:
        self.find(".who button").click()
        self.wait_for("#password")

    def hand_in_file(self, path: Path, *, course: str = COURSE, slug: str = SLUG) -> int:
        """Upload a file on the assignment's page; returns the submission's number."""
        self.open(f"/c/{course}/{slug}")
        self.find("#file").send_keys(str(path))
        self.find("#hand-in button.main").click()
        # the form has a field of that name, too: the address tells the pages apart
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(
            lambda driver: "/submissions/" in driver.current_url, "the hand-in was not accepted"
        )
        self.wait_for("#source")
        return int(self.driver.current_url.rpartition("/")[2])

    def wait_for_report(self, timeout_s: float = 60.0) -> WebElement:
        """The report's headline, as soon as it has appeared in the open page."""
        return self.wait_for("#report .verdict", timeout_s)

    def shot(self, name: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Path:
        """The whole page as a picture below `artifacts/screenshots`."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.appear(width=width, height=height, dark=dark)
        tall = self.driver.execute_script("return document.documentElement.scrollHeight")
        self.appear(width=width, height=min(int(tall), 12_000), dark=dark)
        path = SHOTS / f"{name}-{width}{'-dark' if dark else ''}.png"
        self.driver.save_screenshot(str(path))
        self.appear(width=1280, height=900, dark=False)
        return path

    def appear(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the window's inner size and the preferred colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def overflow(self) -> int:
        """How many pixels the page is wider than its window; zero on a page that reads well."""
        script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.driver.execute_script(script))

    def complaints(self) -> list[str]:
        """What the browser wrote into its console about this server: script errors, and what the policy blocked."""
        said = [str(entry["message"]) for entry in self.driver.get_log("browser")]
        # told, not complained of: what a log-out asks for was done
        said = [line for line in said if "Clear-Site-Data header" not in line]
        # a stream of an earlier test's server may end, loudly, while the browser is already here
        return [line for line in said if "http://127.0.0.1:" not in line or self.base in line]

    def start_over(self) -> None:
        """Forget who was logged in; cookies are deleted of the page that is open."""
        self.open("/health")
        self.driver.delete_all_cookies()


def visit(pages: Pages, tour: Tour) -> Iterator[str]:
    """Opens page after page; yields the name of the one that is open."""
    for person, paths in tour.items():
        if person:
            pages.log_in(person, PASSWORD)
        for name, path in paths.items():
            pages.open(path)
            yield name
        pages.open("/")
        if person:
            pages.log_out()


@contextmanager
def serve(app: Flask) -> Iterator[str]:
    """The application behind the real web server, on a free port; yields its address."""
    server = create_server(app, host="127.0.0.1", port=0, **SERVER_OPTIONS)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        # a stream ends when it next looks whether its browser is still there
        deadline = time.monotonic() + 10
        while server.task_dispatcher.active_count and time.monotonic() < deadline:
            time.sleep(0.02)

        def close() -> None:
            for channel in list(server.active_channels.values()):
                channel.handle_close()  # a browser keeps its connections for the next page
            server.close()

        server.trigger.pull_trigger(close)  # in the server's own thread, whose loop then has nothing left to do
        thread.join(10)
        assert not thread.is_alive()
        server.task_dispatcher.shutdown()
