"""A real browser without a window, spoken to through two pipes.

What it is asked to do, and what it reports, are messages of the DevTools protocol: JSON
that ends with a zero byte. The browser reads from descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update"),
)


def find() -> str | None:
    """Return the path of a browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser."""

    def __init__(self, reads: int, writes: int, seconds: float = 60) -> None:
        self._reads, self._writes, self._seconds = reads, writes, seconds
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        #: What the page has said and asked for since it was opened.
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Do something and return what comes of it."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        """Return the next message, having noted what it tells of the page."""
        deadline = time.monotonic() + self._seconds
        while b"\0" not in self._buffer:
            left = max(0, deadline - time.monotonic())
            assert select.select([self._reads], [], [], left)[0], "no answer in time"
            read = os.read(self._reads, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        method, told = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.messages.append(json.dumps(told))
        elif method == "Log.entryAdded":
            self.messages.append(told["entry"]["text"])
        return message

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Show a file in a window of a width, and wait until it is there."""
        self.messages, self.requests, self._loaded = [], [], False
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()

    def evaluate(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self) -> bytes:
        """Return a PNG file of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])


def _pipe() -> list[int]:
    """Return a pipe whose descriptors are none of those that the browser wants."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


@contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """Start a browser that keeps its files in a folder, and end it."""
    program = find()
    assert program is not None
    to_us, from_it = _pipe()
    from_us, to_it = _pipe()
    move = f"import os, sys; os.dup2({from_us}, 3); os.dup2({from_it}, 4)"
    starter = [
        sys.executable,
        "-S",
        "-c",
        f"{move}; os.execv(sys.argv[1], sys.argv[1:])",
    ]
    command = [*starter, program, *OPTIONS, f"--user-data-dir={folder}"]
    with subprocess.Popen(
        command,
        pass_fds=(from_us, from_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        os.close(from_us)
        os.close(from_it)
        try:
            yield Browser(to_us, to_it)
        finally:
            os.close(to_us)
            os.close(to_it)  # the browser ends when nobody speaks to it
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Write a picture of a page: ``browser.py PAGE.html PICTURE.png WIDTH``."""
    from PIL import Image  # few colours make a small file

    page, picture, width = sys.argv[1:]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with opened(Path(folder)) as browser:
            browser.open(Path(page).resolve(), int(width))
            image = Image.open(io.BytesIO(browser.screenshot()))
    image.convert("RGB").quantize(160, dither=Image.Dither.NONE).save(picture)


if __name__ == "__main__":
    main()
