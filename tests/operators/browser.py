"""A page in a headless Chromium, over its DevTools protocol."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from weightbus.tests.compose.waiting import wait_for

SECONDS = 60.0
CHROMIUM = shutil.which("chromium")


class Browser:
    """A browser of some size, on one page.

    Args:
        width, height: Of its window, in pixels.
        dark: Whether its user likes dark pages.
        folder: An empty folder for what it keeps.
    """

    def __init__(self, folder: Path, width: int, height: int, *, dark: bool = False) -> None:
        assert CHROMIUM is not None, "install Chromium: apt-get install chromium"
        self._loop = asyncio.new_event_loop()
        self._size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._scheme = "dark" if dark else "light"
        self._log = folder / "log"
        words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(words, stderr=log)  # noqa: S603
        self._number = 0

    def __enter__(self) -> "Browser":
        try:
            where = wait_for(self._listening, "the browser listens", SECONDS)
            request = urllib.request.Request(f"http://{where}/json/new", method="PUT")
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
                self._run(self._connect(json.load(answer)["webSocketDebuggerUrl"]))
            media = [{"name": "prefers-color-scheme", "value": self._scheme}]
            self.say("Emulation.setEmulatedMedia", features=media)
            self.say("Emulation.setDeviceMetricsOverride", **self._size)
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait(SECONDS)

    def _listening(self) -> str:
        found = re.search(r"DevTools listening on ws://([^/]+)/", self._log.read_text())
        return found[1] if found is not None else ""

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, SECONDS))

    async def _connect(self, url: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(url, max_msg_size=2**27)

    def say(self, method: str, **parameters: Any) -> Any:
        """Give an order, and return what came of it."""
        return self._run(self._ask(method, parameters))

    async def _ask(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        await self._socket.send_json(order)
        while (answer := await self._socket.receive_json()).get("id") != self._number:
            pass
        return answer["result"]

    def open(self, url: str) -> None:
        """Go to a page."""
        self.say("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return what an expression is in the page."""
        found = self.say("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def shows(self, words: str) -> bool:
        """Return whether the page shows some words."""
        return words in str(self.value("document.body && document.body.innerText"))

    def picture(self, path: Path) -> None:
        """Write what it shows into a file."""
        found = self.say("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))
