"""A real Chromium without a window, driven by its own protocol over a pipe: nothing to install but
Debian's `chromium`."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0
"""A hang guard for tests, no measure."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """The program; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    return found


class Browser:
    """One browser with one page. Close it."""

    def __init__(self, profile: Path) -> None:
        down_read, self._down = os.pipe()
        self._up, up_write = os.pipe()

        def pipes() -> None:
            # The protocol is on descriptors 3 and 4; where the pipes lie now may be one of these.
            # Out of each other's way first: either may be 3 or 4 by chance.
            low = fcntl.fcntl(down_read, fcntl.F_DUPFD, 64)
            high = fcntl.fcntl(up_write, fcntl.F_DUPFD, 64)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [
                chromium(),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down_read)
        os.close(up_write)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._down, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def open(self, url: str, *, wide: int = 1280, high: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=wide,
            height=high,
            deviceScaleFactor=1,
            mobile=wide < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def until(self, script: str) -> None:
        """Wait for an expression to be true."""
        deadline = time.monotonic() + LIMIT_S
        while not self.run(script):
            assert time.monotonic() < deadline, f"never: {script}; {self.faults()}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """What an element says to a reader."""
        said: str = self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return said

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def faults(self) -> list[str]:
        """What the page complained about: exceptions, errors of the console, of its policy."""
        self.run("1")  # takes in the events that have come
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                said.append(str(params["exceptionDetails"].get("exception", params)))
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                said.append(params["entry"]["text"])
        return said

    def requests(self) -> list[str]:
        """URLs that the page asked for."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)
        os.close(self._down)
        os.close(self._up)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._up], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._up, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed
