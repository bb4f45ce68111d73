"""What every request passes first: it came under a name of ours, from no foreign web page, with the key if there is one."""

import hmac
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.local import PREFIX, is_local
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.reply import answer_json

OPEN = ("/", "/health", "/ready")  # what who has no key may ask: the page, which holds nothing, and whether a server is there
HOST = re.compile(
    r"(?:\[(?P<address>[0-9a-f]*:[0-9a-f:.]+)\]|(?P<name>[^:\[\]]+))(?::[0-9]{1,5})?"
)  # as a browser writes it, in lower case


class Guard:
    """An application behind its gate.

    A page of any web site can send requests to a port of its reader's machine, and, by a name that it owns, read the answers.

    Args:
        app: what is guarded.
        api_key: what clients must show, "" for nothing.
        hosts: names under which they may come, () for any.
        log: told one line of each that may not.
    """

    def __init__(self, app: ASGIApp, api_key: str, hosts: tuple[str, ...], log: Callable[[str], None]) -> None:
        self.app, self.hosts, self.log = app, hosts, log
        self.key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        why = self._why_not(scope) if scope["type"] == "http" else None
        if why is None:
            await self.app(scope, receive, send)
        else:
            self.log(f"{time.strftime('%H:%M:%S')} {shown(scope['path'])}: {why.status} {why.message}")
            await answer_json(why.body, why.status, why.headers)(scope, receive, send)

    def _why_not(self, scope: Scope) -> Refusal | None:
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
        given = shown_key.strip(b" \t") if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # Anthropic's
        known = hmac.compare_digest(given, self.key)
        if self.key and guarded and not known:
            return Refusal(401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key")
        return None
