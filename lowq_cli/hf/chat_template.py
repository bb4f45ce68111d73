"""A conversation as its model's chat template writes it: a program from strangers, in the sandbox that transformers keeps safe.

That sandbox keeps a template from files and code, not from looping for ever or asking for all memory: so it runs in a process
of its own, with SECONDS and BYTES to spend, which is started with the first conversation (0.8 s) and ends with this one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from lowq_packers.errors import DamagedError, LowqError

SECONDS, BYTES = 5.0, 1 << 28  # for one conversation; the longest templates of 2026 take 20 ms
_started: "list[subprocess.Popen[bytes]]" = []
_one_at_a_time = Lock()


def render(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, named: Mapping[str, Any], **more: Any
) -> str:
    """The text of a conversation; `named` are the special tokens that templates may write, `more` what else it is told.

    Raises DamagedError where the template fails, loops on, or writes without end.
    """
    facts = {"chat_template": template, "add_generation_prompt": add_generation_prompt, **named, **more}
    line = json.dumps({"conversations": [list(messages)], **facts}, default=str).encode() + b"\n"
    with _one_at_a_time:
        worker = _worker()
        try:
            assert worker.stdin
            assert worker.stdout
            worker.stdin.write(line)
            worker.stdin.flush()
            said = worker.stdout.readline(BYTES)
        except OSError:
            said = b""
        except BaseException:  # Ctrl-C: what it says next would be the answer to another question
            _end()
            raise
        if not said.endswith(b"\n"):
            _end()
            raise DamagedError(f"the model's chat template takes more than {SECONDS:g} s or {BYTES >> 20} MB; it is not used")
    answer = json.loads(said)
    if "error" in answer:
        raise DamagedError(f"the model's chat template cannot write this conversation: {answer['error']}")
    return str(answer["text"])


def _worker() -> "subprocess.Popen[bytes]":
    """The process that renders, started if there is none."""
    if _started and _started[0].poll() is not None:
        _end()
    if not _started:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # -P: nothing of the working folder is run
        line = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        _started.append(
            subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
        )
        assert _started[0].stdout
        if _started[0].stdout.readline() != b"ready\n":
            _end()
            raise LowqError("the process that renders chat templates does not start; try: lowq doctor")
    return _started[0]


def _end() -> None:
    worker = _started.pop()
    worker.kill()
    with worker:  # closes its pipes, and waits
        pass


def serve() -> None:
    """What the process does: a line of facts in, a line of text out, within its means."""
    import resource
    import signal

    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as f:
            most = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + 2 * BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(b"ready\n")
    answers.flush()
    call: Any = render_jinja_template  # it says that it gives a text, and gives a pair of lists
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            told: dict[str, Any] = {"text": call(**json.loads(line))[0][0]}
        except MemoryError:
            told = {"error": f"it takes more than {2 * BYTES >> 20} MB of memory"}
        except Exception as e:  # the template is a program from strangers: whatever it raises is its answer
            told = {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(told).encode() + b"\n")
        answers.flush()
