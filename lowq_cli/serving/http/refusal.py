"""Errors as OpenAI's clients know them: a status, and a JSON object with our one line in it."""

import re
from dataclasses import dataclass

from lowq_cli.serving.request import Busy
from lowq_packers.errors import LowqError, UsageError, one_line

RETRY_AFTER = 1  # seconds that a client is asked to wait when the queue is full


@dataclass(eq=False)  # not frozen: an exception is given its traceback, and not equal to another
class Refusal(Exception):
    """Why a request is not answered. param: the field that is to blame; code: OpenAI's word for the kind, where it has one.
    retry: seconds after which it may be answered, None where waiting does not help.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry: int | None = None

    @property
    def body(self) -> dict[str, object]:
        """What the client reads."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        retry = RETRY_AFTER if self.status == 429 else self.retry
        return {} if retry is None else {"Retry-After": str(retry)}


def wrong(param: str, message: str) -> Refusal:
    """A field that holds something else than it may."""
    return Refusal(400, f"{param}: {message}", param=param)


def bug(error: Exception) -> Refusal:
    """A mistake of ours."""
    return Refusal(500, f"internal error, please report it: {type(error).__name__}: {one_line(error)}", "server_error")


def of(error: LowqError) -> Refusal:
    """What the engine or a check of ours refuses. A line that begins with a field's name names the field."""
    line = " ".join(str(error).split())
    if isinstance(error, Busy):
        return Refusal(429, line, "rate_limit_error", code="rate_limit_exceeded")
    if not isinstance(error, UsageError):
        return Refusal(503, line, "server_error")
    named = re.match(r"(\w+)=", line)
    return Refusal(400, line, param=named[1] if named else None)
