"""Start `lowq serve` and ask it with OpenAI's own client."""

import re
import subprocess

from openai import OpenAI

# "demo" is the small model in the package: it continues texts, it does not chat
SERVE = ["lowq", "serve", "demo", "--port", "0", "--device", "cpu", "--name", "demo"]


def main() -> None:
    server = subprocess.Popen(SERVE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(m[1] for line in server.stderr if (m := re.search(r"listening on (http://\S+)", line)))
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        print("models:", [m.id for m in client.models.list()])
        for chunk in client.completions.create(model="demo", prompt="Once upon a time", max_tokens=16, stream=True):
            print(chunk.choices[0].text, end="", flush=True)
        whole = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=16, temperature=0, n=1)
        print(f"\n{whole.usage.completion_tokens} tokens, ended by {whole.choices[0].finish_reason}")
    finally:
        server.terminate()
        server.communicate(timeout=60)


if __name__ == "__main__":
    main()
