"""The system's Chromium, headless, driven over the DevTools protocol through a pipe: no driver and no package needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")


def found():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser. Every wait ends with an error after `seconds`."""

    def __init__(self, profile: Path, seconds: float = 60.0) -> None:
        self.seconds, self.number, self.events, self.held = seconds, 0, [], b""
        (theirs_in, self.out), (self.back, theirs_out) = os.pipe(), os.pipe()

        def as_three_and_four() -> None:
            a, b = os.dup(theirs_in), os.dup(theirs_out)  # out of the way: one of them may be 3 or 4
            os.dup2(a, 3)
            os.dup2(b, 4)

        line = [
            found(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        line += [f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions"]
        line += ["--disable-background-networking"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(line, pass_fds=(3, 4), preexec_fn=as_three_and_four, **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """What the browser answers to a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session and not method.startswith("Target."):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.seconds
        while True:
            output = self._next(until)
            if output.get("id") == self.number:
                assert "error" not in output, output["error"]
                return output["result"]
            self.events.append(output)

    def _next(self, until):
        while b"\0" not in self.held:
            ready, _, _ = select.select([self.back], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self.back, 1 << 16)
            assert piece, "the browser has ended"
            self.held += piece
        line, _, self.held = self.held.partition(b"\0")
        return json.loads(line)

    def look(self, width, height, dark=False, phone=False):
        """The size and kind of screen."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        """Go to a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href.startsWith('http')")

    def run(self, script):
        """The value of an expression in the page."""
        output = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in output, output["exceptionDetails"]
        return output["result"].get("value")

    def wait(self, script):
        """Wait until an expression is true."""
        until = time.monotonic() + self.seconds
        while not self.run(f"!!({script})"):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.02)

    def type(self, text):
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, code, **more):
        """Press a key."""
        known = {"key": key, "code": key, "windowsVirtualKeyCode": code, **more}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **known)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def click(self, selector):
        """Click in the middle of an element, as a mouse does."""
        where = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({where})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path):
        """A screenshot, as a PNG file."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def asked(self):
        """Every address that was asked for."""
        self.run("1")
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def complaints(self):
        """What the browser's console has of errors."""
        self.run("1")
        entries = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        thrown = [e["params"] for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        return [e["text"] for e in entries if e["level"] == "error"] + [str(t) for t in thrown]

    def close(self):
        """End it."""
        os.close(self.out)
        os.close(self.back)
        self.process.kill()
        self.process.wait()
