"""Damaged requests to a real server: an answer, or an error that the path's clients read, and no harm to the next."""

import http.client
import json
import socket
from contextlib import suppress

import pytest
from broken_requests import STATUSES, head, request, shape_fault

PLAIN = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}).encode()
SOUND = head("POST", "/v1/completions", [f"Content-Length: {len(PLAIN)}"]) + PLAIN


def ask(url, raw):
    """(status, media type, body) of the answer to the bytes `raw`."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as s:
        with suppress(OSError):  # the server may refuse before it has read everything
            s.sendall(raw)
        answer = http.client.HTTPResponse(s, method="POST")
        answer.begin()
        return answer.status, answer.getheader("content-type"), answer.read()


def fault(url, seed):
    """What is wrong with the answer to the request of `seed`, "" if nothing is."""
    path, raw = request(seed)
    status, media, body = ask(url, raw)
    if status not in STATUSES:
        return f"{status} {body[:200]!r}"
    if status != 200:
        return shape_fault(path, json.loads(body))
    if b"internal error" in body:
        return f"{body[-200:]!r}"
    if media == "application/json":
        json.loads(body, parse_constant=pytest.fail)
    return ""


@pytest.mark.parametrize(
    "seeds", [range(200), *(pytest.param(range(first, first + 1000), marks=pytest.mark.more) for first in (1000, 2000))]
)
def test_a_damaged_request_has_an_error_of_its_dialect_and_harms_no_other(server, seeds):
    text = json.loads(ask(server.url, SOUND)[2])["choices"][0]["text"]
    faults = {seed: why for seed in seeds if (why := fault(server.url, seed))}
    assert not faults
    assert not [line for line in server.said if "Traceback" in line]
    assert json.loads(ask(server.url, SOUND)[2])["choices"][0]["text"] == text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/nothing", "/api/chat", "/api/nothing", "/v1/nothing"])
@pytest.mark.parametrize("headers", [["Content-Length: 2"], ["Content-Length: 2", "Origin: https://evil.example"]])
def test_a_refusal_outside_of_the_endpoints_has_the_shape_of_its_dialect(server, path, headers):
    status, _, body = ask(server.url, head("PUT", path, headers) + b"{}")
    assert status in (403, 404, 405)
    assert shape_fault(path, json.loads(body)) == ""


HALF = "\\ud800"  # of a surrogate pair, as JSON writes it
KINDS = ('["image_url"]', "{}")
BROKEN = [
    *(f'{{"messages": [{{"role": "user", "content": [{{"type": {kind}}}]}}]}}' for kind in KINDS),
    f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{{"type": "function", "function": {{"name": "f", '
    f'"description": "{HALF}"}}}}]}}',
]


@pytest.mark.parametrize("body", BROKEN)
def test_a_type_that_is_no_text_and_half_a_character_are_refused(server, body):
    raw = body.encode()
    status, _, answer = ask(server.url, head("POST", "/v1/chat/completions", [f"Content-Length: {len(raw)}"]) + raw)
    assert status == 400
    assert shape_fault("/v1/chat/completions", json.loads(answer)) == ""
