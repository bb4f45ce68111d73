"""lowq chat: talk to a checkpoint; the cache is kept between turns, so an answer never waits for the whole conversation."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import console, line_input, thinking
from lowq_cli.commands import (
    Device,
    Draft,
    KeepAlive,
    KvCache,
    NoThink,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    checkpoint_argument,
    seed_or_random,
    unescaped,
)
from lowq_cli.generation.chat_model import LocalModel, ServerModel, server_of
from lowq_cli.running import Declined
from lowq_packers.atomic import write_new
from lowq_packers.errors import LowqError, UsageError

if TYPE_CHECKING:
    from lowq_cli.engine import Generation
    from lowq_cli.running import Reply

INSIDE = """/help shows this
/new starts over
/image FILE sends a picture with your next message
/system TEXT starts over with this system message
/set NAME VALUE: temperature, top-p, top-k, repetition-penalty, max-new-tokens, seed, stop
/save FILE writes the conversation (.json: messages, else text)
/quit or Ctrl-D leaves
Ctrl-C stops an answer, or clears the line
several lines: end them with \\, or put \"\"\" before and after"""
EXAMPLES = """Examples:
  lowq chat
  lowq chat ./my-model-lowq --system 'Answer in one sentence.'
  lowq chat --session trip   (continues where it ended)

Inside:
""" + "\n".join(f"  {line}" for line in INSIDE.splitlines())


CUT = {  # finish reason -> why an answer was cut
    "length": "the longest answer that --max-new-tokens or /set max-new-tokens allows",
    "context": "the model's context is full; /new starts over",
}
LONGEST = 1024  # default max. tokens of an answer; at most a quarter of the context, so that several turns fit


@dataclass
class Settings:
    """The sampling settings of answers, which /set changes."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    max_new_tokens: int = LONGEST
    seed: int = 0
    stop: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise UsageError for a value out of range."""
        from lowq_cli.engine.sampling import Sampling

        Sampling(self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.seed)
        if self.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens={self.max_new_tokens} must be at least 1")

    def set(self, name: str, value: str) -> None:
        """Give the setting called `name`, with - or _, a value. Raises UsageError."""
        key = name.replace("-", "_")
        if key not in asdict(self):
            raise UsageError(f"there is no setting {name!r}; the settings are {', '.join(asdict(self)).replace('_', '-')}")
        try:
            parsed: Any = [unescaped(value)] * bool(value) if key == "stop" else type(getattr(self, key))(value)
        except ValueError:
            raise UsageError(f"{name} takes a number, not {value!r}") from None
        before = getattr(self, key)
        setattr(self, key, parsed)
        try:
            self.check()
        except UsageError:
            setattr(self, key, before)
            raise

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in asdict(self).items() if value != [])


def chat(
    checkpoint: Annotated[str | None, checkpoint_argument("Folder or hub id.")] = None,
    system: Annotated[str, typer.Option(help="System message before the conversation.")] = "",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Longest answer, in tokens.  [default: {LONGEST}, or a quarter of a small context]"),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End an answer before this text; repeatable.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    kv: KvCache = "16",
    draft: Draft = "auto",
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="Save the conversation under this name; next time it continues.")
    ] = None,
    keep_alive: KeepAlive = None,
    no_think: NoThink = False,
) -> None:
    """Talk to a checkpoint, turn by turn."""
    from lowq_cli import sessions, state

    given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    others: dict[str, Any] = {
        "max_new_tokens": LONGEST if max_new_tokens is None else max_new_tokens,
        "seed": seed_or_random(seed),
        "stop": [unescaped(s) for s in stop or ()],
    }
    Settings(**{n: v for n, v in given.items() if v is not None}, **others).check()
    before: list[dict[str, str]] = []
    if session is not None:
        sessions.prepare(session)
        saved_system, before = sessions.read(session)
        if before and system and system != saved_system:
            raise UsageError(f"the session {session} exists already; leave --system out, or use another name")
        system = saved_system if before else system
    folder = state.checkpoint_or_last(checkpoint)
    think = False if no_think else None
    load = partial(LocalModel, folder, given, device, kv, draft, think, session)
    may_ask = threads is None and draft == "auto"
    speaker: LocalModel | ServerModel = (may_ask and server_of(folder, given, device, kv, keep_alive, think)) or load()
    settings = Settings(**speaker.drawn, **others)
    if max_new_tokens is None and speaker.context:
        settings.max_new_tokens = max(1, min(LONGEST, speaker.context // 4))
    line_input.prepare()
    talk = speaker.begin(system, before)
    _greet(speaker, settings, session, len(before))
    turn = len(before) // 2
    while (typed := line_input.ask()) is not None:
        if (order := line_input.command(typed)) is not None:
            if order[0] == "quit":
                break
            try:
                if order[0] == "image" and isinstance(speaker, ServerModel):  # a server accepts only text
                    speaker, talk = _moved(talk, load)
                talk = _obey(*order, talk, settings, speaker.begin)
                _keep(session, talk)
            except LowqError as e:
                console.say(str(e))
            continue
        turn += 1
        drawn = asdict(settings) | {"seed": settings.seed + turn}
        try:
            try:
                answer = speaker.answer(talk, typed, drawn)
            except Declined:  # the server has ended: continue without it
                speaker, talk = _moved(talk, load)
                answer = speaker.answer(talk, typed, drawn)
            with line_input.unechoed():
                _write(answer)
        except LowqError as e:  # the context is full, or the input is not valid text
            console.say(f"{e}; /new starts over")
            continue
        speaker.answered(talk, typed, answer)
        _keep(session, talk)
    if session is not None and isinstance(speaker, LocalModel) and any(m["role"] == "user" for m in talk.messages):
        speaker.keep(session)


def _moved(talk: Any, own: Callable[[], LocalModel]) -> tuple[LocalModel, Any]:
    """The model in this process, with the conversation that a server had answered so far."""
    speaker = own()
    return speaker, speaker.begin(talk.system, [m for m in talk.messages if m["role"] != "system"])


def _greet(speaker: "LocalModel | ServerModel", settings: Settings, session: str | None, messages: int) -> None:
    """The lines before the first prompt."""
    from lowq_cli.engine.generation_config import described

    if not speaker.begin().template:
        console.say("this model has no chat template: it continues your text instead of answering it")
    if session is not None:
        cached = ", whose saved cache is used" if isinstance(speaker, LocalModel) and speaker.recalled else ""
        console.say(f"session {session}: " + (f"continues after {messages} messages{cached}" if messages else "new"))
    if sys.stdin.isatty():
        drawn = f"{speaker.where}{described(speaker.drawn, speaker.origins)}, seed {settings.seed}"
        console.say(f"{drawn}; /help lists the commands, /quit or Ctrl-D leaves")


def _keep(session: str | None, talk: Any) -> None:
    """Save a session's conversation; where that fails, such as on a full disk, it goes on."""
    if session is not None:
        from lowq_cli import sessions

        try:
            sessions.write(session, talk.system, [{**m, "content": _said(m["content"])} for m in talk.messages])
        except LowqError as e:
            console.say(str(e))


def _obey(name: str, rest: str, talk: Any, settings: Settings, begin: Callable[[str], Any]) -> Any:
    """Run a line such as "/set top-k 40"; returns the conversation to continue with. Raises UsageError."""
    if name == "help":
        console.page(INSIDE)
    elif name == "new":
        console.say("a new conversation")
        return begin(talk.system)
    elif name == "system":
        if rest:
            console.say("a new conversation with this system message")
            return begin(rest)
        console.say(talk.system or "there is no system message; /system TEXT sets one")
    elif name == "set":
        key, _, value = rest.partition(" ")
        if key:
            settings.set(key, value.strip())
        console.say(str(settings))
    elif name == "image":
        if not rest:
            raise UsageError("/image needs a file: /image photo.jpg")
        for file in _files(rest):
            talk.show(file)
            console.say(f"{file} will be sent with your next message")
    elif name == "save":
        save(talk.messages, rest)
    else:
        raise UsageError(f"there is no command /{name}; /help lists them")
    return talk


def _files(line: str) -> list[str]:
    """The files that a line names: itself, or its words, with spaces escaped as by a terminal onto which a file is dropped."""
    if Path(line).expanduser().is_file():
        return [line]
    try:
        return shlex.split(line)
    except ValueError:  # an open quote
        return [line]


def save(messages: list[dict[str, str]], name: str) -> None:
    """Write the conversation to a file. Raises UsageError if the file cannot be written, or exists."""
    path = Path(name).expanduser()
    if not name:
        raise UsageError("/save needs a file: /save talk.json, or /save talk.txt")
    whole = path.suffix == ".json"
    text = (
        json.dumps(messages, ensure_ascii=False, indent=1)
        if whole
        else "\n\n".join(f"{m['role']}: {_said(m['content'])}" for m in messages)
    )
    try:
        write_new(path, (text + "\n").encode())
    except FileExistsError:
        raise UsageError(f"{path} exists already; name another file") from None
    except OSError as e:
        raise UsageError(f"{path} cannot be written: {e.strerror}") from None
    console.say(f"saved {len(messages)} messages to {path}")


def _said(content: Any) -> str:
    """The text of a message, with a word in place of each picture."""
    return content if isinstance(content, str) else " ".join(part.get("text", "[picture]") for part in content)


def _write(answer: "Generation | Reply") -> None:
    """Stream an answer; Ctrl-C ends the answer and keeps the conversation."""
    if thinking.write(answer, answer.facts.get("marks") if hasattr(answer, "facts") else answer.marks):
        console.say(" (stopped)")
    console.out("")
    if why := CUT.get(answer.finish_reason):
        console.say(f"[cut after {len(answer.tokens[0])} tokens: {why}]")
    if sys.stderr.isatty():
        drafting = getattr(answer, "drafting", None)
        pictures_s = getattr(answer, "pictures_s", 0.0)
        seen = f" (with {pictures_s:.2f} s for the pictures)" if pictures_s else ""
        several = f", {drafting.accepted} drafted" if drafting and drafting.accepted else ""
        console.say(
            f"[{len(answer.tokens[0])} tokens{several}, {answer.decode_tps:.1f}/s, first after {answer.ttft_s:.2f} s{seen}]"
        )
