"""Files next to weights, altered at random, and the commands that read them: tokenizers, templates, adapters, recipes.

A command ends in one line that names the file or its folder, with an exit code, and leaves nothing behind; or it ends well.
Then a tokenizer has the ids that transformers reads, and a head or a table of measurements changes no text.
"""

import contextlib
import io
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from _pytest.monkeypatch import MonkeyPatch
from bend import bent_bits, bent_field, bent_header, mend
from judge import Verdict
from kills import drafted, entries, unfinished
from valid import SIZES, dense

from lowq_cli import console, main
from lowq_cli.serving.catalog import read_config
from lowq_packers.errors import LowqError

MORE = (10**400, float("nan"), float("inf"), "\ud800")  # which JSON of Python holds
SLOW = 5.0  # seconds of processor time
SECONDS = 30  # after so many a command has hung
# in lines that name no file: of a template, finite factors that are very large, a recipe's pattern, prompts, a model type
ENOUGH = ("chat template", "output is NaN", "matches no weight", "prompt ", "upgrade transformers")
OURS = "internal error"  # in the line about a mistake of ours
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>", "model_max_length": 64,
    "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
}  # fmt: skip
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [257]}
LORA = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "down_proj"],
    "use_rslora": False, "use_dora": False, "rank_pattern": {"x.q_proj": 8}, "alpha_pattern": {}, "modules_to_save": None,
}  # fmt: skip
EXTRA: dict[str, Any] = {  # name -> contents of files that a folder gets only to be altered
    "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "<|end|>"},
    "added_tokens.json": {"<s>": 256, "<|end|>": 257},
    "chat_template.jinja": TEMPLATE,
    "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8}},
}
OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
OF_MODEL = (*OF_TOKENIZER, "chat_template.jinja", "generation_config.json", "preprocessor_config.json")
WAYS: dict[str, Callable[[bytes, Random], bytes]] = {
    "cut": lambda raw, rng: raw[: rng.randrange(len(raw))],
    "empty": lambda raw, rng: b"",
    "noise": lambda raw, rng: rng.randbytes(99),
    "no UTF-8": lambda raw, rng: raw[: (at := rng.randrange(len(raw)))] + b"\xff" + raw[at:],
    "half a character": lambda raw, rng: raw.replace(b'"', b'"\\ud800', 3),
    "a list": lambda raw, rng: b"[" + raw + b"]",
    "a word": lambda raw, rng: b'"x"',
    "NaN": lambda raw, rng: b"NaN",
    "deep": lambda raw, rng: b"[" * 100_000,
    "long number": lambda raw, rng: raw.replace(b": 2", b": " + b"9" * 5000, 1),
    "twice": lambda raw, rng: raw + raw,
    "a mark first": lambda raw, rng: b"\xef\xbb\xbf" + raw,
}

OF_TEXT = ("cut", "empty", "noise", "no UTF-8")  # those that are no JSON
GIVEN = {  # files that are named on the command line
    "recipe.toml": (
        'bits = 4\ngroup = 32\nmethod = "rtn"\nlm_head = 8\nskip = ["layers.0"]\n\n[overrides]\n"*.down_proj" = "8:32"\n'
    ),
    "models.toml": (
        'default = "a"\nmemory = "1GB"\nkeep_alive = "5m"\n\n[models.a]\npath = "packed"\naliases = ["b"]\ndraft = "none"\n'
    ),
    "prompts.jsonl": '{"prompt": "Once"}\n{"messages": [{"role": "user", "content": "Who?"}]}\n"upon"\n',
}
VALUE = re.compile(r'(?<=[=:] )("[^"\n]*"|[\w.+-]+)|(?<=\[)"[^"\n]*"')  # of TOML and JSON
LITERALS = (
    *('""', '"x"', "-1", "0", "3", "1e400", "nan", "inf", "[]", "{}", "true", "null", "1979-05-27", "[[[]]]", "9" * 400),
    *('"\\u0000"', '"\\ud800"', f'"{"a" * 3000}"', '"../x"', '"(a+)+$"', "0.5", "["),
)


@dataclass(frozen=True)
class Use:
    """A command that reads files of a folder. same: files that may change none of what it prints."""

    folder: str
    files: tuple[str, ...]
    words: tuple[str, ...]
    same: tuple[str, ...] = ()


def uses(bent: Path, text: Path) -> dict[str, Use]:
    """The commands, on the altered copies in `bent`."""
    packed, some = str(bent / "packed"), ("--max-new-tokens", "4", "--device", "cpu", "--json")
    greedy = ("--prompt", "Once upon a", "--temperature", "0", *some)
    quantized = ("--method", "gptq", "--calib", str(text), "--calib-tokens", "4096", "--bits", "4", "--group", "32")
    tables = ("lowq_tune.json", "lowq_report.json")
    index = ("model.safetensors.index.json",)
    head = ("config.json", "model.safetensors", "lowq_draft.json")
    return {
        "generate": Use("packed", (*OF_MODEL, *tables, "config.json"), ("generate", packed, *greedy), tables),
        "generate --chat": Use("packed", OF_MODEL, ("generate", packed, "--chat", "--prompt", "Once", "--seed", "1", *some)),
        "generate --lora": Use(
            "adapter",
            ("adapter_config.json", "adapter_model.safetensors"),
            ("generate", packed, "--lora", str(bent / "adapter"), *greedy),
        ),
        "generate --draft": Use("head", head, ("generate", packed, "--draft", str(bent / "head"), *greedy), head),
        "eval": Use("packed", (*OF_MODEL, *tables), ("eval", packed, "--text", str(text), "--device", "cpu", "--json")),
        "inspect": Use("packed", (*OF_MODEL, *tables), ("inspect", packed, "--json")),
        "export a file": Use("packed", OF_MODEL, ("export", packed, "--to", "gguf", "--out", str(bent / "out.gguf"), "--json")),
        "export a folder": Use(
            "packed", OF_MODEL, ("export", packed, "--to", "compressed-tensors", "--out", str(bent / "out"), "--json")
        ),
        "quantize": Use(
            "dense", OF_MODEL, ("quantize", str(bent / "dense"), *quantized, "--out", str(bent / "out"), "--device", "cpu")
        ),
        "serve": Use("packed", (*OF_MODEL, *tables), ("serve", packed)),
        "serve --lora": Use(
            "adapter", ("adapter_config.json", "adapter_model.safetensors"), ("serve", packed, str(bent / "adapter"))
        ),
        "generate, shards": Use("shards", index, ("generate", str(bent / "shards"), *greedy), index),
        "generate --prompts": Use(
            "given", ("prompts.jsonl",), ("generate", packed, "--prompts", str(bent / "given" / "prompts.jsonl"), *some)
        ),
        "quantize --recipe": Use(
            "given",
            ("recipe.toml",),
            ("quantize", str(bent / "dense"), "--recipe", str(bent / "given" / "recipe.toml"), "--out", str(bent / "out")),
        ),
        "serve --config": Use("given", ("models.toml",), ("config", str(bent / "given" / "models.toml"))),
        "draft train": Use("state", ("lowq-draft-state.safetensors",), ("draft", str(bent / "dense"), str(bent / "state"))),
    }


COMPANIONS = {file for use in uses(Path(), Path()).values() for file in use.files}  # names of all files that are altered


class Companions:
    """Valid folders, and copies of them in which one file is altered."""

    def __init__(self, folder: Path) -> None:
        self.valid, self.bent, self.text = folder / "valid", folder / "bent", folder / "text.txt"
        self.text.parent.mkdir(parents=True, exist_ok=True)
        self.text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 12)
        _make(self.valid, self.text)
        self.bent.mkdir()
        self.uses = uses(self.bent, self.text)
        self.folders = [p.name for p in self.valid.iterdir()]
        self.texts: dict[str, Any] = {}
        self._mend()
        for name, use in self.uses.items():
            code, out, err = self._run(use)
            assert code == 0, f"{name}: {err}"
            self.texts[name] = _text(out)
            self._clear()

    def bend(self, seed: int) -> tuple[str, dict[str, Any], Verdict]:
        """The file that one seed alters, how, and the verdict."""
        rng = Random(seed)
        name = rng.choice(list(self.uses))
        use = self.uses[name]
        file = rng.choice(use.files)
        self._mend()
        path = self.bent / use.folder / file
        if not path.exists():
            content = EXTRA[file]
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        what = {"command": name, **_alter(path, rng)}
        return file, what, self.judge(name, file)

    def judge(self, name: str, file: str) -> Verdict:
        """The verdict on a command whose file is altered."""
        use, began = self.uses[name], time.process_time()
        code, out, err = self._run(use)
        spent = time.process_time() - began
        left = [p.name for p in self.bent.iterdir() if p.name not in self.folders]
        lines = [line for line in err.splitlines() if line.startswith("lowq: ")]
        fault = ""
        if code == 1 or OURS in err or "Traceback" in err:
            fault = f"exit code {code}: {err.strip()[-300:]}"
        elif code and len(lines) != 1:
            fault = f"{len(lines)} lines about an error: {err[-300:]}"
        elif code and not any(name in lines[0] for name in (file, str(self.bent / use.folder), *ENOUGH)):
            fault = f"the line names no file: {lines[0]}"
        elif code and left:
            fault = f"left {left[0]}"
        elif not code and file in use.same and _text(out) != self.texts[name]:
            fault = "another text"
        elif not code and file in OF_TOKENIZER and name in ("generate", "generate --chat"):
            fault = _other_ids(self.bent / use.folder)
        elif spent > SLOW:
            fault = f"took {spent:.1f} s"
        self._clear()
        return Verdict(not code, fault, spent)

    def _run(self, use: Use) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _ended():
            if use.words[0] == "serve":
                code = _coded(lambda: _loaded(*use.words[1:]))
            elif use.words[0] == "config":
                code = _coded(lambda: read_config(Path(use.words[1])))
            elif use.words[0] == "draft":
                code = _coded(lambda: drafted(Path(use.words[1]), self.text, Path(use.words[2]), 60.0))
            else:
                code = main.main([*use.words])
        return code, out.getvalue(), err.getvalue()

    def _mend(self) -> None:
        self._clear()
        for name in self.folders:
            for path in (self.bent / name).glob("*"):
                if path.is_dir():
                    shutil.rmtree(path)
            mend(self.valid / name, self.bent / name)

    def _clear(self) -> None:
        for path in self.bent.iterdir():
            if path.name not in self.folders:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _make(folder: Path, text: Path) -> None:
    """A model of three layers, dense and packed, a draft head, an adapter, and the state of a head's training."""
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer

    from lowq_cli.run.pipeline import quantize
    from lowq_cli.tuning.tuner import save

    sizes = SIZES | {"num_hidden_layers": 3, "vocab_size": 272, "max_position_embeddings": 64}
    model, packed, adapter = dense(folder / "dense", sizes), folder / "packed", folder / "adapter"
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    tokens.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (model / "generation_config.json").write_text(json.dumps(SAMPLING))
    quantize(model, packed, bits=4, group=32, method="rtn", zero="none", lm_head="keep")
    quantize(model, folder / "shards", bits=4, group=32, method="rtn", lm_head="keep", shard_size=40_000)
    save(packed, torch.device("cpu"), entries())
    (folder / "given").mkdir()
    for name, content in GIVEN.items():
        (folder / "given" / name).write_text(content)
    adapter.mkdir()
    rng, factors = torch.Generator().manual_seed(0), {}
    for module in (f"base_model.model.model.layers.{i}.{n}" for i in range(3) for n in ("self_attn.q_proj", "mlp.down_proj")):
        factors[f"{module}.lora_A.weight"] = torch.randn(4, 128, generator=rng)
        factors[f"{module}.lora_B.weight"] = torch.randn(128, 4, generator=rng) / 10
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(LORA))
    drafted(model, text, folder / "head", 60.0)
    unfinished(model, text, folder / "state")


def _alter(path: Path, rng: Random) -> dict[str, Any]:
    """Alter a file: as a whole, or a field, a tensor, or bits of it. How."""
    words = path.name in (*GIVEN, "chat_template.jinja")
    if path.suffix == ".jinja" or rng.random() < 0.4:
        how = rng.choice([*(OF_TEXT if words else WAYS), "a folder"])
        if how == "a folder":
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(WAYS[how](path.read_bytes(), rng))
        return {"file": path.name, "how": how}
    if words:
        content = path.read_text()
        place, literal = rng.choice([*VALUE.finditer(content)]).span(), rng.choice(LITERALS)
        path.write_text(content[: place[0]] + literal + content[place[1] :])
        return {"file": path.name, "place": place, "value": literal[:80]}
    if path.suffix == ".safetensors":
        kind = rng.choice(("header", "tensor", "bits"))
        how = {"at": bent_bits(path, rng)} if kind == "bits" else bent_header(path, rng, kind == "tensor")
        return {"file": path.name, **how}
    return {"file": path.name, **bent_field(path, rng, MORE)}


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """End a command that hangs."""

    def end(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _coded(work: Callable[[], object]) -> int:
    """The exit code of work without a command line, whose error is printed as `main` prints it."""
    try:
        work()
    except LowqError as e:
        console.fail(" ".join(str(e).split()))
        return e.exit_code
    except Exception as e:
        console.fail(f"{OURS}: {type(e).__name__}: {e}")
        return 1
    return 0


def _loaded(model: str, adapter: str = "") -> None:
    """What a server's process does with a model; an adapter that it does not take is an error here."""
    from lowq_cli.serving import mask_process
    from lowq_cli.serving.http import loading

    how: dict[str, Any] = {"running": 1, "cache_tokens": 64, "deterministic": False, "kv": "16"}
    with MonkeyPatch.context() as patch:
        patch.setattr(mask_process.MaskProcess, "__init__", lambda self, *_: None)
        patch.setattr(mask_process.MaskProcess, "stop", lambda self: None)
        made = loading.load(model, "cpu", how | ({"lora": {"a": adapter}} if adapter else {}), True)
    for refused in made.facts.facts.refused.values():
        raise LowqError(refused.why)


def _text(out: str) -> Any:
    """The text that a command printed as JSON; None for another output."""
    try:
        return json.loads(out).get("text")
    except ValueError:
        return None


def _other_ids(folder: Path) -> str:
    """Where lowq's tokenizer gives other ids than transformers'; "" if nowhere."""
    from transformers import AutoTokenizer

    from lowq_cli.engine.open_model import tokenizer
    from lowq_cli.files.source import open_source

    with open_source(str(folder)) as source:
        ours = tokenizer(source)
    words = "Once upon a time<|end|>"
    try:
        whole = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        whole.model_max_length = 1 << 30  # another type of value is an error only for transformers, which warns of longer texts
        theirs = whole(words)["input_ids"]
    except Exception as e:
        theirs = f"an error: {e}"
    ids = ours(words)["input_ids"]
    return "" if ids == theirs else f"ids {ids}, by transformers {theirs}"
