"""Renders conversations with a model's chat template, which is untrusted code, in transformers' sandbox.

The sandbox keeps a template from files and code, but not from endless loops or from taking all memory. A separate process
therefore renders, limited to SECONDS and BYTES. Its start takes 0.8 s, most of it transformers' import: `begin` starts it while
a model is loaded, and otherwise the first conversation does. It ends with this process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from lowq_cli.files.templates import has_template
from lowq_cli.state import user_path
from lowq_packers.errors import DamagedError, LowqError

SECONDS, BYTES = 5.0, 1 << 28  # limits per conversation; the longest templates of 2026 take 20 ms
_started: "list[_Worker]" = []
_one_at_a_time = Lock()


class _Worker:
    """The process that renders; `ready` once it has answered."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # -P: do not import from the working folder
        line = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        # a process group of its own: this process handles the terminal's Ctrl-C
        self.process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=null, env=env, process_group=0)
        self.ready = False


def begin(model: str) -> None:
    """Start the process that renders, unless it runs or the model's folder has no template, and do not wait for it."""
    if not _started and has_template(user_path(model)):
        with _one_at_a_time, suppress(OSError):  # such as too many processes: `render` says so, if it is needed
            if not _started:
                _started.append(_Worker())


class TemplateRefusal(DamagedError):
    """A chat template failed on these messages; it may take them in another order."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, named: Mapping[str, Any], **more: Any
) -> str:
    """The text of a conversation. named: the special tokens that templates may write; more: further template variables.

    Raises TemplateRefusal where the template fails, DamagedError where it loops on or writes without end.
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
            reply = worker.stdout.readline(BYTES)
        except OSError:
            reply = b""
        except BaseException:  # e.g. Ctrl-C: the process's next answer would belong to an earlier call
            _end()
            raise
        if not reply.endswith(b"\n"):
            _end()
            raise DamagedError(f"the model's chat template takes more than {SECONDS:g} s or {BYTES >> 20} MB; it is not used")
    answer = json.loads(reply)
    if "error" in answer:
        raise TemplateRefusal(f"the model's chat template cannot write this conversation: {answer['error']}")
    return str(answer["text"])


def _worker() -> "subprocess.Popen[bytes]":
    """The process that renders, ready; started if it does not run."""
    if _started and _started[0].process.poll() is not None:
        _end()
    if not _started:
        _started.append(_Worker())
    worker = _started[0]
    if not worker.ready:
        assert worker.process.stdout
        if worker.process.stdout.readline() != b"ready\n":
            _end()
            raise LowqError("the process that renders chat templates does not start; try: lowq doctor")
        worker.ready = True
    return worker.process


def _end() -> None:
    worker = _started.pop().process
    worker.kill()
    with worker:  # closes its pipes, and waits
        pass


def serve() -> None:
    """The loop of the rendering process: reads a line of arguments, writes a line with the text, within the limits."""
    import resource
    import signal

    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as f:
            most = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + 2 * BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(b"ready\n")
    answers.flush()
    call: Any = render_jinja_template  # annotated as a string, but returns a pair of lists
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            answer: dict[str, Any] = {"text": call(**json.loads(line))[0][0]}
        except MemoryError:
            answer = {"error": f"it takes more than {2 * BYTES >> 20} MB of memory"}
        except RecursionError:
            answer = {"error": "it is nested too deeply"}
        except Exception as e:  # untrusted code may raise anything; the error is the answer
            answer = {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
