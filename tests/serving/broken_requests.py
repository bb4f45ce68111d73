"""Bodies that each path answers, requests at random whose bodies are damaged, and the shape of each dialect's errors."""

import json
import random

TEXT = [{"type": "text", "text": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["b"]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
USER = {"role": "user", "content": TEXT}
BODIES = {  # each path, and bodies that it answers
    "/v1/chat/completions": [
        {"messages": [USER], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, "stop": ["q"]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "x"}],
         "tools": [TOOL], "tool_choice": "auto", "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1},
        {"messages": [USER], "response_format": FORM, "max_tokens": 2, "logit_bias": {"3": 1}, "seed": 1, "n": 1},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 2},
        {"messages": [USER], "guided_choice": ["x", "y"], "max_tokens": 2, "chat_template_kwargs": {"shout": True}},
        {"messages": [USER], "response_format": {"type": "regex", "regex": "a+b"}, "max_tokens": 2},
    ],
    "/v1/completions": [
        {"prompt": "x", "max_tokens": 2, "logprobs": 1, "echo": True, "temperature": 0, "stop": "q"},
        {"prompt": [[3, 4], [5]], "max_tokens": 1, "stream": True, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "ignore_eos": True},
    ],
    "/v1/responses": [
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                   {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
                   {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "x"}],
         "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "max_output_tokens": 2, "metadata": {"a": "b"}},
        {"input": "x", "instructions": "x", "max_output_tokens": 2, "stream": True, "text": {"format": {"type": "text"}},
         "reasoning": {"effort": "low"}},
    ],
    "/v1/messages": [
        {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""},
                                                             {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": TEXT}]}],
         "system": TEXT, "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}, "max_tokens": 2},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True, "stop_sequences": ["q"],
         "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}},
    ],
    "/v1/messages/count_tokens": [{"messages": [USER], "tools": [{"name": "f", "input_schema": SCHEMA}]}],
    "/api/chat": [
        {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 2, "temperature": 0}, "keep_alive": "5m"},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
         "tools": [TOOL], "options": {"num_predict": 2, "stop": ["q"]}, "stream": False, "format": SCHEMA},
    ],
    "/api/generate": [{"prompt": "x", "system": "x", "options": {"num_predict": 2}, "stream": False, "raw": False}],
    "/api/show": [{"model": "talk", "verbose": False}],
    "/api/embed": [{"model": "talk", "input": ["x", "y"], "truncate": True, "dimensions": 4}],
    "/api/embeddings": [{"prompt": "x"}],
    "/tokenize": [{"prompt": "x", "with_pieces": True, "add_special_tokens": True}, {"messages": [USER], "tools": [TOOL]}],
    "/detokenize": [{"tokens": [3, 4]}],
    "/v1/embeddings": [{"input": ["x", "y"], "dimensions": 4, "encoding_format": "base64"}, {"input": [[3], [4, 5]]}],
    "/v1/rerank": [{"query": "x", "documents": ["x", {"text": "y"}], "top_n": 1}],
}  # fmt: skip
GETS = ("/api/tags", "/api/ps", "/api/version", "/v1/models", "/v1/models/talk", "/health")
STATUSES = (200, 400, 403, 404, 405, 408, 413, 415, 429)
NUMBERS = ("-1", "0", "1", "-0.0", "1e400", "-1e400", "NaN", "Infinity", "1e-320", "0.5", str(2**31), str(2**63),
           str(-(2**63) - 1))  # fmt: skip
TEXTS = (r"\ud800", r"\udfff\ud800", r"\u0000", "", r"{\"a\":\"\\ud800\"}", "x" * 70_000, "\u202e", "é" * 300, r"\ud83d\ude00",
         "user", "tool", "{", "m")  # fmt: skip
DEPTHS = (3, 60, 200, 320, 480, 900, 940, 960, 980, 5000)


def written(value, mark, change):
    """`value` as JSON; the part at the number `mark` of a walk is what `change` makes of it."""
    count = [0]

    def walk(v):
        count[0] += 1
        if count[0] == mark:
            return change(v)
        if isinstance(v, dict):
            return "{" + ",".join(f"{json.dumps(k)}:{walk(x)}" for k, x in v.items()) + "}"
        if isinstance(v, list):
            return "[" + ",".join(walk(x) for x in v) + "]"
        return json.dumps(v)

    return walk(value)


def size(value):
    """The number of parts of a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(size, inner))


def junk(rng):
    """A function that replaces one part of a body by JSON text of another kind."""
    depth = rng.choice(DEPTHS)

    def plain():
        return rng.choice((*NUMBERS, *(f'"{t}"' for t in TEXTS), "null", "true", "false", "[]", "{}", "9" * 5000))

    def change(v):
        old = json.dumps(v)
        kind = rng.randrange(12)
        if kind < 5:
            return plain()
        if kind == 5:
            return "[" * depth + old + "]" * depth
        if kind == 6:
            return '{"items":' * depth + old + "}" * depth
        if kind == 7:
            return '{"type":"object","properties":{"a":' * (depth // 2) + "{}" + "}}" * (depth // 2)
        if kind == 8:
            return "[" + ",".join([old] * rng.choice((2, 129, 5000))) + "]"
        if kind == 9 and isinstance(v, dict):
            twice = [*v.items(), *((k, None) for k in v)]
            rng.shuffle(twice)
            return "{" + ",".join(f"{json.dumps(k)}:{json.dumps(x) if x is not None else plain()}" for k, x in twice) + "}"
        if kind == 10 and isinstance(v, dict):
            return json.dumps(v)[:-1] + ("," if v else "") + f'"{rng.choice(TEXTS)}":{plain()}}}'
        return rng.choice(('{"$ref":"#"}', '{"type":["x"]}', '{"pattern":"(a+)+$","type":"string"}', '{"type":"x"}', plain()))

    return change


def request(seed):
    """(the path, the bytes of a request)."""
    rng = random.Random(seed)
    if rng.random() < 0.03:
        path, method = (
            rng.choice((*GETS, *BODIES, "/v1/nothing", "/v1/messages/nothing", "/api/nothing")),
            rng.choice(("GET", "PUT", "POST")),
        )
        body = b"" if method == "GET" else b"{}"
        return path, head(method, path, [f"Content-Length: {len(body)}"]) + body
    path = rng.choice(list(BODIES))
    value = rng.choice(BODIES[path])
    body = written(value, rng.randint(1, size(value)), junk(rng))
    if rng.random() < 0.3:
        try:
            value = json.loads(body)
            body = written(value, rng.randint(1, min(size(value), 99)), junk(rng))
        except (ValueError, RecursionError):
            pass
    raw = body.encode("utf-8", "surrogatepass")
    kind = rng.randrange(20)
    if kind == 0:
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif kind == 1:
        raw = bytearray(raw)
        for _ in range(rng.choice((1, 1, 9))):
            if raw:
                raw[rng.randrange(len(raw))] = rng.randrange(256)
        raw = bytes(raw)
    elif kind == 2:
        raw = raw.decode().encode(rng.choice(("utf-16", "utf-8-sig", "utf-32-le")), "replace")
    headers = [
        "Content-Type: "
        + rng.choice(("application/json", "text/plain", "multipart/form-data", "x", "application/json; charset=latin-1"))
    ]
    if kind == 3:
        at = sorted(rng.randrange(len(raw) + 1) for _ in range(3))
        pieces = [p for p in (raw[: at[0]], raw[at[0] : at[1]], raw[at[1] : at[2]], raw[at[2] :]) if p]
        chunks = b"".join(b"%x;x=y\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
        return path, head("POST", path, [*headers, "Transfer-Encoding: chunked"]) + chunks
    if kind == 4:
        headers.append(
            rng.choice(
                (
                    "Content-Encoding: gzip",
                    "Expect: 100-continue",
                    "Accept: text/html",
                    "Authorization: é",
                    "Origin: https://evil",
                )
            )
        )
    return path, head("POST", path, [*headers, f"Content-Length: {len(raw)}"]) + raw


def head(method, path, headers):
    """The head of a request, after whose answer the server ends the connection."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]).encode(
        "latin-1"
    )


def shape_fault(path, error):
    """What is wrong with the body of a refusal, "" if its path's clients can read it."""
    if path.startswith("/api/"):
        line = error.get("error")
        whole = set(error) == {"error"}
    else:
        inner = error.get("error")
        line = inner.get("message") if isinstance(inner, dict) else None
        if path.startswith("/v1/messages"):
            whole = error.get("type") == "error" and isinstance(inner, dict) and set(inner) == {"type", "message"}
        else:
            whole = isinstance(inner, dict) and {"message", "type", "param", "code"} == set(inner)
    if not whole or not isinstance(line, str):
        return f"another dialect's error: {error}"
    return "" if line and "\n" not in line and len(line) < 1000 else f"not a line: {line[:300]!r}"
