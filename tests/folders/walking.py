"""Run every command on one published folder and compare with transformers; returns each step's failure, if any.

Commands run in this process; the server is its application, with the tokenizer that went to it through a pickle as it goes to
another process.
"""

import io
import json
import os
import pickle
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from making import write
from published import FAMILIES, Family
from saying import served_by
from starlette.testclient import TestClient

import lowq
from lowq_cli import main
from lowq_cli.engine import native_loader
from lowq_cli.engine.open_model import tokenizer
from lowq_cli.files.source import open_source
from lowq_cli.serving.http import loading
from lowq_cli.serving.http.app import make_app
from lowq_packers.arch import families

STEPS = ("tokens", "generate", "quantize", "inspect", "packed", "chat", "eval", "serve", "stream", "tools", "export", "back")
TEXTS = (
    "",
    "Once upon a time",
    " two  spaces\n\nand 12345",
    "naïve 🙂 日本語 Ünï",
    "<think>x</think><|im_end|></s><eos>",
    "  \n",
)
PROMPT, NEW = "Once upon a time there", 8
SAID = [{"role": "user", "content": "Who is there?"}]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}}}
]
# Whatever the publisher says, so that transformers' likeliest tokens are the right ones:
GREEDY = ("--device", "cpu", "--temperature", "0", "--repetition-penalty", "1", "--json")
HOW = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
TIE = 0.1  # of the logits' deviation: two tokens nearer than this are as likely, and bf16 may choose either


class Walk:
    """The steps of one family; each raises where what it found is not what transformers has."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family: Family = FAMILIES[name]
        self.published, self.packed, self.exported = folder / name, folder / "packed", folder / "exported"
        self.notes: dict[str, str] = {}
        write(self.family, self.published)
        self.readable = _readable(self.family, self.published)
        self.theirs = transformers.AutoTokenizer.from_pretrained(self.readable)
        if self.theirs.chat_template is None and self.family.templates:  # of a processor, which transformers' tokenizer leaves
            self.theirs.chat_template = self.family.templates["default"]

    def take(self) -> dict[str, str]:
        """Each step -> "" or why it failed; a step that needs one that failed is left out."""
        result: dict[str, str] = {}
        with torch.no_grad(), ExitStack() as self.exits:
            for step in STEPS:
                try:
                    getattr(self, f"step_{step}")()
                    result[step] = ""
                except Exception as e:
                    result[step] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        return result

    def step_tokens(self) -> None:
        with open_source(str(self.published)) as source:
            ours = pickle.loads(pickle.dumps(tokenizer(source)))
        for text in TEXTS:
            for special in (True, False):
                ids = self.theirs(text, add_special_tokens=special)["input_ids"]
                _same(ours(text, add_special_tokens=special)["input_ids"], ids, repr(text))
                for skip in (True, False):
                    how = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
                    _same(ours.decode(ids, **how), self.theirs.decode(ids, **how), f"the text of {ids}")
        _same((ours.bos_token_id, ours.eos_token_id), (self.theirs.bos_token_id, self.theirs.eos_token_id), "bos, eos")
        _same(bool(ours.chat_template), bool(self.family.templates), "whether it has a template")
        for more in ({}, {"tools": TOOLS}) if self.family.templates else ():
            ids = self.theirs.apply_chat_template(SAID, **HOW, **more)
            _same(ours.apply_chat_template(SAID, **HOW, **more), ids, "a conversation")

    def step_generate(self) -> None:
        """As transformers has the dense model: each token the likeliest, and the text that of the tokens."""
        self._natively(self.published)
        made = json_of("generate", self.published, "--prompt", PROMPT, "--max-new-tokens", NEW, *GREEDY)
        dense = getattr(transformers, self.family.model).from_pretrained(self.readable).eval()
        self._likeliest(dense, made)

    def _natively(self, folder: Path) -> None:
        """A family that is described is read and run without transformers. Raises NotPlain with the reason where it is not."""
        with open_source(str(folder)) as source:
            if source.config["model_type"] in families():
                native_loader.read(source, torch.device("cpu"))

    def _likeliest(self, model: Any, made: dict[str, Any]) -> None:
        prompt, tokens = self.theirs(PROMPT)["input_ids"], made["tokens"]
        _same(made["prompt_tokens"], len(prompt), "tokens of the prompt")
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
        rows = logits[len(prompt) - 1 : -1]
        gaps = (rows.max(-1).values - rows[range(len(tokens)), tokens]) / rows.std(-1)
        far = (gaps > TIE).sum().item()  # of a mixture one may be: two experts can be as likely, too
        mixture = any("expert" in name for name, _ in model.named_modules())
        assert far <= mixture, f"{tokens} are {gaps.tolist()} deviations behind the likeliest {rows.argmax(-1).tolist()}"
        ends = next(e for c in (model.generation_config, model.config.get_text_config()) if (e := c.eos_token_id) is not None)
        ends = ends if isinstance(ends, list) else [ends]
        assert made["finish_reason"] == ("stop" if tokens[-1] in ends else "length"), (made["finish_reason"], tokens, ends)
        shown = tokens[:-1] if tokens[-1] in ends else tokens
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        whole = self.theirs.decode(prompt + shown, **how)
        _same(_certain(made["text"]), _certain(whole[len(self.theirs.decode(prompt, **how)) :]), "the text")

    def step_quantize(self) -> None:
        run(
            "quantize",
            self.published,
            "--bits",
            4,
            "--group",
            32,
            "--zero",
            "none",
            "--method",
            "rtn",
            "--lm-head",
            "keep",
            "--out",
            self.packed,
            "--quiet",
        )
        companions = {p.name for p in self.published.iterdir()} - {p.name for p in self.published.glob("*.safetensors*")}
        kept = {p.name for p in self.packed.iterdir()}
        assert companions - {"params.json"} <= kept, f"left behind: {companions - kept}"

    def step_inspect(self) -> None:
        result = json_of("inspect", self.packed, "--json")
        assert result["format"] == "lowq", result

    def step_packed(self) -> None:
        """The checkpoint, as transformers computes it with the same weights."""
        self._natively(self.packed)
        self.made = json_of("generate", self.packed, "--prompt", PROMPT, "--max-new-tokens", NEW, *GREEDY)
        self._likeliest(lowq.load(str(self.packed), "cpu")[0], self.made)

    def step_chat(self) -> None:
        output = run("chat", self.packed, "--max-new-tokens", 4, "--device", "cpu", given="Who is there?\nAnd now?\n")[1]
        assert ("no chat template" in output) != bool(self.family.templates), output

    def step_eval(self) -> None:
        text = self.published.parent / "text.txt"
        text.write_text("Once upon a time there was a king who had a daughter. " * 4)
        result = json_of("eval", self.packed, "--text", text, "--max-tokens", 100, "--device", "cpu", "--json")
        assert 1 < result["ppl"] < 1e9, result

    def step_serve(self) -> None:
        """The server's application: a text as `generate` writes it, a chat of as many tokens as transformers makes of it."""
        how = {"running": 2, "cache_tokens": self.family.cache_tokens, "deterministic": False, "kv": "16"}
        made = loading.load(str(self.packed), "cpu", how, True)
        loaded = pickle.loads(pickle.dumps(made.facts))
        expected = "continuous batching" if self.family.model_type in families() else "one after another"
        _same(made.engine.name, expected, "the engine")
        client = TestClient(make_app(served_by(made.engine, loaded.tokenizer, loaded.stop_ids, loaded.facts.published)))
        self.client = self.exits.enter_context(client)
        whole = self.post("completions", prompt=PROMPT, max_tokens=NEW, temperature=0)
        self.served = whole["choices"][0]["text"]
        _same(_certain(self.served), _certain(self.made["text"]), "the text served")
        _same(whole["usage"]["prompt_tokens"], self.made["prompt_tokens"], "tokens of the prompt")
        if self.family.templates:
            chat = self.post("chat/completions", messages=SAID, max_tokens=NEW, temperature=0)
            ids = self.theirs.apply_chat_template(SAID, **HOW)
            _same(chat["usage"]["prompt_tokens"], len(ids), "tokens of the conversation")
            assert isinstance(chat["choices"][0]["message"]["content"], str), chat

    def step_stream(self) -> None:
        body = {"model": "m", "stream": True, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "repetition_penalty": 1}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        _same(_certain("".join(line["choices"][0]["text"] for line in lines)), _certain(self.served), "the pieces together")

    def step_tools(self) -> None:
        if not any("tools" in t for t in self.family.templates.values()):
            self.notes["tools"] = "no place for them in the template" if self.family.templates else "no template"
            return
        result = self.post("chat/completions", messages=SAID, tools=TOOLS, max_tokens=NEW, temperature=0)
        ids = self.theirs.apply_chat_template(SAID, tools=TOOLS, **HOW)
        _same(result["usage"]["prompt_tokens"], len(ids), "tokens of the conversation with tools")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(f"/v1/{path}", json={"model": "m", "repetition_penalty": 1, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def step_export(self) -> None:
        code, _, output = run_command("export", self.packed, "--to", "compressed-tensors", "--out", self.exported, "--json")
        if code == 5:
            self.notes["export"] = output.strip().removeprefix("lowq: ")
            return
        assert code == 0, output

    def step_back(self) -> None:
        if "export" in self.notes:
            return
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.exported.parent / "cache")):  # where it is imported to
            self._as_before()

    def _as_before(self) -> None:
        assert json_of("inspect", self.exported, "--json")["format"] != "lowq"
        again = json_of("generate", self.exported, "--prompt", PROMPT, "--max-new-tokens", NEW, *GREEDY)
        _same(again["tokens"], self.made["tokens"], "the tokens of what was exported")


def cells(walk: Walk, faults: Any = ()) -> dict[str, str]:
    """Each step -> "yes", "fails", or why there is nothing to do in it."""
    notes = dict.fromkeys(("chat",), "no template") if not walk.family.templates else {}
    notes |= {k: v for k, v in walk.notes.items() if k in STEPS}
    notes |= {"back": "not exported"} if "export" in notes else {}
    return {step: "fails" if step in faults else notes.get(step, "yes") for step in STEPS}


def row(name: str, walk: Walk, faults: Any) -> dict[str, str]:
    """A line of the table."""
    facts = json.loads((walk.published / "config.json").read_text())
    where = {"tokenizer_config.json": "config", "chat_template.jinja": "jinja", "chat_template.json": "json"}[walk.family.kept]
    template = f"{where}, {len(walk.family.templates)}" if len(walk.family.templates) > 1 else where
    output = {"architecture": facts["architectures"][0], "vocabulary": walk.family.vocabulary}
    output |= {
        "class": walk.family.tokenizer.get("tokenizer_class", "none"),
        "template": template if walk.family.template else "none",
    }
    return {"family": name, **output, **cells(walk, faults)}


def _readable(family: Family, folder: Path) -> str:
    """A folder that transformers reads: Kimi K2's model type, which it lacks, is DeepSeek V3 by the folder's own code."""
    facts = json.loads((folder / "config.json").read_text())
    if facts["model_type"] == family.model_type:
        return str(folder)
    other = folder.parent / "readable"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).symlink_to(path)
    (other / "config.json").unlink()
    (other / "config.json").write_text(
        json.dumps({k: v for k, v in facts.items() if k != "auto_map"} | {"model_type": family.model_type})
    )
    return str(other)


def _certain(text: str) -> str:
    """A text without bytes that are none: a decoder of ▁words takes all bytes of a run for bad once one of them is, and streams
    have shown the good ones before it by then."""
    return "".join(c for c in text if c >= " " and c != "\ufffd") if "\ufffd" in text else text


def _same(found: Any, wanted: Any, what: str) -> None:
    assert found == wanted, f"{what}: {found!r}, transformers has {wanted!r}"


def run_command(*words: Any, given: str = "") -> tuple[int, str, str]:
    """A command of lowq in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "stdin", io.StringIO(given)), redirect_stdout(out), redirect_stderr(err):
        code = main.main([*map(str, words)])
    return code, out.getvalue(), err.getvalue()


def run(*words: Any, given: str = "") -> tuple[str, str]:
    """Its stdout and stderr, where it ends well."""
    code, out, err = run_command(*words, given=given)
    assert code == 0, f"lowq {words[0]} ended with {code}: {err.strip()[-400:]}"
    return out, err


def json_of(*words: Any) -> dict[str, Any]:
    return json.loads(run(*words)[0])
