"""A page in a real Chromium without a window, driven by the DevTools protocol over a pipe: no port,
no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ABSENT = "chromium is not on PATH (apt-get install chromium)"
SECONDS = 50.0


class Browser:
    """One page. Remembers what it said on its console, what went wrong in it, and what it asked of
    a network."""

    def __init__(self) -> None:
        assert CHROMIUM is not None, ABSENT
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-sync",
        ]
        flags += [
            "--disable-component-update",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ]
        line = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        command = [
            "bash",
            "-c",
            line,
            "chromium",
            CHROMIUM,
            *flags,
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        """Console messages and errors."""
        self.requested: list[str] = []
        """URLs."""
        (target,) = (
            each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"
        )
        self._session = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Wait until the page has loaded."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        went = self.call("Page.navigate", url=path.absolute().as_uri())
        assert "errorText" not in went, f"{path}: {went}"
        until = time.monotonic() + SECONDS
        while (
            self.evaluate("document.readyState") != "complete"
            or self.evaluate("location.protocol") != "file:"
        ):
            assert time.monotonic() < until, f"{path} has not loaded"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """A JSON value."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, selector: str, x_scale: float, down: float) -> None:
        """Move the pointer to a place of an element, as shares of its width and height."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block:"
            " 'center'});const b = e.getBoundingClientRect(); return [b.left, b.top, b.width,"
            " b.height] })()"
        )
        x, y = box[0] + x_scale * box[2], box[1] + down * box[3]
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, *, whole: bool = True) -> bytes:
        """A PNG file."""
        given: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            given = {
                "clip": {
                    "x": 0,
                    "y": 0,
                    "width": size["width"],
                    "height": size["height"],
                    "scale": 1,
                },
                "captureBeyondViewport": True,
            }
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **given)["data"])

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, "chromium does not answer" if not ready else "chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.said.append(
                " ".join(str(each.get("value", each.get("description"))) for each in given["args"])
            )
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(given["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(given["request"]["url"])
