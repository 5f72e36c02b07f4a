"""Chromium by its driver, as Debian installs both: what the tests of pages open them with.

    apt-get install chromium chromium-driver; pip install 'globaltensor[browser]'

A browser has a profile of its own in a folder that is new, and reaches nothing but files and the loopback.
"""
from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
MISSING = next((f"no {what}" for what, is_there in (
    (CHROMIUM, Path(CHROMIUM).exists()), (DRIVER, Path(DRIVER).exists()),
    ("selenium", find_spec("selenium") is not None)) if not is_there), "")


@contextmanager
def chromium(width: int = 1300, height: int = 1000, scripts: bool = True, dark: bool = False) -> Iterator:
    """A browser without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service
    options = Options()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    with tempfile.TemporaryDirectory() as profile:
        for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                     "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage",
                     "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
                     f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            if dark:
                use_theme(browser, dark=True)
            yield browser
        finally:
            browser.quit()


def use_theme(browser, dark: bool) -> None:
    """As if the reader's system were set so."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def open_report(browser, path: Path, limit: float = 60.0) -> None:
    """Open a page of a report and wait until it is drawn; what the console says is an error."""
    browser.get(f"file://{path}")
    end = time.monotonic() + limit
    while not browser.execute_script("return window.report && (report.ready || report.error)"):
        assert time.monotonic() < end, "the page is not ready"
        time.sleep(0.02)
    assert browser.execute_script("return report.error") == ""
    no_complaints(browser)


def no_complaints(browser) -> None:
    """The console is empty, but for advice about tests that read what is on a canvas."""
    said = [entry["message"] for entry in browser.get_log("browser")]
    assert [message for message in said if "willReadFrequently" not in message] == []
