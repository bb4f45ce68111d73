"""Checks every request first: its Host is allowed, it does not come from a foreign web page, and it has the API key, if set."""

import hmac
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.local import PREFIX, is_local
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.reply import answer_json

Body = Callable[[str, Refusal], object]
OPEN = ("/", "/health", "/ready")  # paths that need no key: the page, which holds no data, and the health checks
HOST = re.compile(
    r"(?:\[(?P<address>[0-9a-f]*:[0-9a-f:.]+)\]|(?P<name>[^:\[\]]+))(?::[0-9]{1,5})?"
)  # a Host header in lower case


class Guard:
    """An ASGI application behind these checks.

    A page of any web site can send requests to a port of its visitor's machine and, through a host name that it controls (DNS
    rebinding), read the answers.

    Args:
        app: the guarded application.
        api_key: the key that clients must send, "" for none.
        hosts: allowed values of the Host header, () for any.
        log: called with one line per refused request.
        body: the body of a refusal at a path.
    """

    def __init__(self, app: ASGIApp, api_key: str, hosts: tuple[str, ...], log: Callable[[str], None], body: Body) -> None:
        self.app, self.hosts, self.log, self.body = app, hosts, log, body
        self.key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""
        why = self.refusal(scope) if scope["type"] == "http" else None
        if why is None:
            await self.app(scope, receive, send)
        else:
            self.log(f"{time.strftime('%H:%M:%S')} {shown(scope['path'])}: {why.status} {why.message}")
            await answer_json(self.body(scope["path"], why), why.status, why.headers)(scope, receive, send)

    def refusal(self, scope: Scope) -> Refusal | None:
        """Why this request is refused; None if it is not."""
        headers = dict(scope["headers"])
        if is_local(scope):
            return None
        if scope["path"].startswith(PREFIX):
            return Refusal(404, f"{shown(scope['path'])} is not served here")
        host = headers.get(b"host", b"").decode("latin-1").lower()
        named = HOST.fullmatch(host)
        if self.hosts and (named is None or (named["address"] or named["name"]) not in self.hosts):
            return Refusal(403, f"this server does not answer under the name {shown(host)}; start it with --host")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and origin.partition("://")[2] != host:
            return Refusal(403, f"a page of {shown(origin)} may not ask this server")
        guarded = scope["path"] not in OPEN
        scheme, _, shown_key = headers.get(b"authorization", b"").partition(b" ")
        given = shown_key.strip(b" \t") if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # Anthropic's header
        authorized = hmac.compare_digest(given, self.key)
        if self.key and guarded and not authorized:
            return Refusal(401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key")
        return None
