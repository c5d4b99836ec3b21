"""Browser: a headless Chromium that a test drives over a pipe, with no driver between.

`--remote-debugging-pipe` speaks the DevTools protocol on two file descriptors: JSON messages, each
ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 60.0


def chromium() -> str | None:
    """Where it is, under the names that Debian and others give it."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Browser:
    """One page. `complaints` collects errors, warnings and exceptions of its console."""

    def __init__(self, home: Path) -> None:
        program = chromium()
        assert program is not None
        (self._out_far, self._out), (self._in, self._in_far) = os.pipe(), os.pipe()
        # The far ends must be 3 and 4 in the browser: a shell puts them there.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--hide-scrollbars", f"--user-data-dir={home / 'profile'}", "about:blank"]
        shell = f'exec "$0" "$@" 3<&{self._out_far} 4>&{self._in_far}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *options],
            pass_fds=(self._out_far, self._in_far),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(self._out_far)
        os.close(self._in_far)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.events: list[str] = []
        page = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session = self.ask("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer of a DevTools method."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                return dict(heard["result"])

    def open(self, page: Path) -> float:
        """Load a file; the seconds until its load event."""
        self.events.clear()
        begin = time.perf_counter()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._hear()
        return time.perf_counter() - begin

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is awaited."""
        told = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in told:
            raise RuntimeError(json.dumps(told["exceptionDetails"]))
        return told["result"].get("value")

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Of the window."""
        shape = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **shape)

    def prefer(self, scheme: str) -> None:
        """Ask the page for "dark" or "light" colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        told = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
