"""A server for real clients, in a thread of this process, on an engine that says a text and keeps what it was asked."""

import socket
import threading
from contextlib import contextmanager

import uvicorn
from saying import Saying, byte_tokenizer, served_by

from lowq_cli.serving.http.app import make_app

PLACE = "{% if false %}<think></think><tool_call></tool_call>{{ tools }}{% endif %}"  # what shows how the model writes
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}({{ t.function.parameters | tojson }}){{ '\\n' }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}[{{ m.reasoning_content or '' }}]: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }}|{{ c.function.name }}|{{ c.function.arguments | tojson }}>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}" + PLACE
)


class Heard(Saying):
    """Says a text, and keeps what it was asked."""

    def __init__(self, text, special=(), template=TEMPLATE):
        self.tokenizer = byte_tokenizer(special=special, template=template)
        super().__init__([*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id])
        self.requests = []

    def submit(self, request):
        self.requests.append(request)
        return super().submit(request)

    @property
    def prompts(self):
        return [self.tokenizer.decode(list(r.prompt)) for r in self.requests]


@contextmanager
def running(engine, **how):
    """The server on a free port of this process; its URL."""
    server = uvicorn.Server(
        uvicorn.Config(make_app(served_by(engine, engine.tokenizer, **how)), log_config=None, lifespan="on")
    )
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
