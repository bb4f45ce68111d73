"""A process of `lowq serve` on folders whose tokenizer comes through transformers, asked by OpenAI's own package."""

import json
import sys
from pathlib import Path

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "folders"))
from making import write
from published import FAMILIES
from walking import HOW, TOOLS

openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")

SAID = [{"role": "user", "content": "Who is there?"}]


def without_class(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tokenizer_class"}))


@pytest.mark.parametrize(
    ("family", "change", "tools"),
    [("gemma-3-1b", None, False), ("command-r7b", None, True), ("smollm2", without_class, True)],
    ids=["Gemma's class", "two templates", "no class"],
)
def test_a_published_folder_is_served(tmp_path, start_on, family, change, tools):
    folder = write(FAMILIES[family], tmp_path / family)
    if change:
        change(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    client = openai.OpenAI(base_url=f"{start_on(folder).url}/v1", api_key="-", max_retries=0)
    how = {"model": family, "messages": SAID, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**how)
    assert whole.usage.prompt_tokens == len(theirs.apply_chat_template(SAID, **HOW))
    assert whole.usage.completion_tokens > 0
    chunks = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**how, stream=True)]
    assert "".join(chunks) == whole.choices[0].message.content
    if tools:
        response = client.chat.completions.create(**how, tools=TOOLS)
        assert response.usage.prompt_tokens == len(theirs.apply_chat_template(SAID, tools=TOOLS, **HOW))
