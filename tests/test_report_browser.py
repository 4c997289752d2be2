"""The report in a real browser: no errors, no sideways scrolling on a phone, two colour schemes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report_helpers import made_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# Chromium's pipe is its descriptors 3 and 4, whatever numbers ours have
EXEC = """
import os, sys
from fcntl import F_DUPFD, fcntl
ends = [fcntl(int(end), F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PHONE, DESK = (375, 812), (1200, 900)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
    pytest.mark.slow,
]


class Browser:
    """One headless Chromium with one page, spoken to over its DevTools pipe."""

    def __init__(self, profile: Path) -> None:
        to_it, mine = os.pipe()
        yours, from_it = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        words = [sys.executable, "-c", EXEC, str(to_it), str(from_it), CHROMIUM or "", *flags]
        self.process = subprocess.Popen(
            words,
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it), os.close(from_it)
        self.write, self.read = os.fdopen(mine, "wb", 0), os.fdopen(yours, "rb")
        self.number, self.session, self.events = 0, "", list[dict[str, Any]]()
        targets = self.ask("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **words: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": words}
        if self.session:
            message["sessionId"] = self.session
        self.write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self.read.read(1)) not in (b"\0", b""):
            data += byte
        assert data, "the browser ended"
        return dict(json.loads(data))

    def wait(self, event: str) -> None:
        """Until an event has come, or is already here."""
        while all(e.get("method") != event for e in self.events):
            self.events.append(self._next())

    def open(self, path: Path, size: tuple[int, int], scheme: str) -> None:
        """Load a file at this size in this colour scheme."""
        width, height = size
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=path.as_uri())
        self.wait("Page.loadEventFired")

    def value(self, script: str) -> Any:
        """What a line of JavaScript gives."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, whole: bool = True) -> bytes:
        """A PNG of the page, all of it."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **(
            {"clip": {"x": 0, "y": 0, "scale": 1, "width": self.value("innerWidth"),
                      "height": self.value("document.documentElement.scrollHeight")}}
            if whole else {}))["data"]  # fmt: skip
        return base64.b64decode(data)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(10)
        self.write.close(), self.read.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    folder = tmp_path_factory.mktemp("records")
    return made_page(folder, path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_page_loads_without_errors_and_fits(
    browser: Browser, page: Path, size: tuple[int, int], scheme: str
) -> None:
    browser.open(page, size, scheme)
    assert browser.value("document.querySelectorAll('section').length") > 5
    complaints = [
        e
        for e in browser.events
        if e.get("method")
        in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    ]
    assert complaints == []
    asked = [
        e["params"]["request"]["url"]
        for e in browser.events
        if e.get("method") == "Network.requestWillBeSent"
    ]
    assert all(url.startswith(("file:", "data:")) for url in asked), asked
    assert browser.value("document.documentElement.scrollWidth") <= size[0]
    # what is wider than the page scrolls inside its own box
    wide = browser.value(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_colour_schemes_differ(browser: Browser, page: Path) -> None:
    """Background and text change places in lightness; the text of a chart follows."""
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(page, DESK, scheme)
        seen[scheme] = [
            browser.value(f"getComputedStyle(document.querySelector('{what}')).{style}")
            for what, style in (("body", "backgroundColor"), ("body", "color"),
                                ("figure svg text", "fill"))
        ]  # fmt: skip
    assert all(a != b for a, b in zip(seen["light"], seen["dark"], strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_a_chart_is_legible_on_a_phone(browser: Browser, page: Path, scheme: str) -> None:
    browser.open(page, (360, 740), scheme)
    heights = browser.value(
        "[...document.querySelectorAll('figure svg text')]"
        ".map(e => e.getBoundingClientRect().height)"
    )
    assert min(heights) >= 10  # CSS pixels


def test_page_prints(browser: Browser, page: Path) -> None:
    browser.open(page, DESK, "light")
    data = base64.b64decode(browser.ask("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert data.startswith(b"%PDF")
