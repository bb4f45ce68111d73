"""A server of `lowq serve` in a process of its own, for the long runs against it."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(a server on a free port, its address, its lines on stderr); stopped after the block, when it has a return code."""
    line = [sys.executable, "-P", "-c", "from lowq_cli.main import run; run()", "serve", "--port", "0", *arguments]
    server, lines = subprocess.Popen(line, stderr=subprocess.PIPE, text=True), list[str]()
    assert server.stderr is not None
    try:
        for text in server.stderr:
            lines.append(text)
            if address := re.search(r"listening on (http://\S+)", text):
                break
        else:
            sys.exit("".join(lines))
        threading.Thread(target=lines.extend, args=(server.stderr,), daemon=True).start()
        yield server, address[1], lines
    finally:
        server.terminate()
        try:
            server.wait(60)
        finally:
            server.kill()
