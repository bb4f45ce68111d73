"""Errors in OpenAI's format: an HTTP status, and a JSON object with a one-line message."""

import re
from dataclasses import dataclass

from lowq_cli.serving.request import Busy
from lowq_packers.errors import LowqError, UsageError, one_line

RETRY_AFTER = 1  # seconds of Retry-After when the queue, or the number of open requests, is at its limit
# Seconds of Retry-After of a 503: many requests wait for models, an engine has died or does not answer, the server is stopping.
RETRY_S = 5


@dataclass(eq=False)  # not frozen: Python sets an exception's traceback; compared by identity
class Refusal(Exception):
    """Why a request is not answered. param: the field with the error. code: OpenAI's code of the error, if it has one.
    retry: seconds after which a retry may succeed; None: RETRY_AFTER for a 429, RETRY_S for a 503, otherwise no retry helps.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry: int | None = None

    @property
    def body(self) -> dict[str, object]:
        """The body of the response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        retry = {429: RETRY_AFTER, 503: RETRY_S}.get(self.status) if self.retry is None else self.retry
        return {} if retry is None else {"Retry-After": str(retry)}


def wrong(param: str, message: str) -> Refusal:
    """The refusal of a field with a value that is not allowed."""
    return Refusal(400, f"{param}: {message}", param=param)


def bug(error: Exception) -> Refusal:
    """A mistake of ours."""
    return Refusal(500, f"internal error, please report it: {type(error).__name__}: {one_line(error)}", "server_error")


def of(error: LowqError | Refusal) -> Refusal:
    """The refusal for an error of the engine or a check. A message that begins with a field's name sets `param`."""
    if isinstance(error, Refusal):
        return error
    line = " ".join(str(error).split())
    if isinstance(error, Busy):
        return Refusal(429, line, "rate_limit_error", code="rate_limit_exceeded")
    if not isinstance(error, UsageError):
        return Refusal(503, line, "server_error")
    named = re.match(r"(\w+)=", line)
    return Refusal(400, line, param=named[1] if named else None)
