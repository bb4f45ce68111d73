"""What answers in a conversation on the command line: a model in this process, or a running server that has it."""

from functools import partial
from typing import TYPE_CHECKING, Any

from lowq_cli import console, thinking
from lowq_cli.running import Declined
from lowq_packers.errors import DoesNotFitError

if TYPE_CHECKING:
    from lowq_cli.engine import Generation
    from lowq_cli.running import Reply


class LocalModel:
    """The model in this process. drawn, origins: sampling settings and their sources. session: whose cache is restored."""

    def __init__(
        self,
        folder: str,
        given: dict[str, Any],
        device: str,
        kv: str,
        draft: str,
        think: bool | None = None,
        session: str | None = None,
    ) -> None:
        from lowq_cli.devices import wake
        from lowq_cli.files.source import check_there
        from lowq_cli.hf import chat_template

        check_there(folder)
        chat_template.begin(folder)
        wake(device)
        with console.status(f"loading {folder}"):
            from lowq_cli.engine.conversation import Conversation
            from lowq_cli.engine.drafts import drafter_choice
            from lowq_cli.engine.generation_config import CONVERSATION, settle
            from lowq_cli.engine.open_model import ready
            from lowq_cli.engine.prompts import context_limit
            from lowq_kernels.decode.kv import check

            check(kv)
            drafter_choice.check(draft)
            self.model, self.tokenizer = ready(folder, device, console.warn)
            drafter_choice.make(draft, self.model, self.tokenizer)  # refused now and not at each message; it stays loaded
            self.drawn, self.origins = settle(self.model, given, CONVERSATION)
            self.recalled, why = (False, "") if session is None else self._recall(session, kv)
        if why:
            console.say(f"the saved cache of session {session} is not used: {why}; the conversation is read again")
        self.how = {"kv": kv, "draft": draft}
        self.begin = lambda system="", messages=(): Conversation(self.tokenizer, system, self.model, messages, think)
        self.where, self.context = "", context_limit(self.model)

    def _recall(self, session: str, kv: str) -> tuple[bool, str]:
        """Restore a session's cache if there is one; returns whether it was restored, or why it cannot be used."""
        from lowq_cli import sessions
        from lowq_cli.engine import saved_cache
        from lowq_cli.engine.decoders import decoder_of

        why = saved_cache.recall(sessions.cache_of(session), self.model, kv)
        return getattr(decoder_of(self.model, kv), "saved", None) is not None, why

    def keep(self, session: str) -> None:
        """Save a session's cache, or print why it is not saved."""
        from lowq_cli import sessions
        from lowq_cli.engine import saved_cache

        try:
            with console.status(f"saving session {session}"):
                saved_cache.keep(sessions.cache_of(session), self.model, self.how["kv"])
        except (DoesNotFitError, OSError) as e:
            why = e.strerror if isinstance(e, OSError) else e
            console.say(f"the text of session {session} is saved, its cache is not: {why}; it will be read again")

    def answer(self, talk: Any, message: str, drawn: dict[str, Any]) -> "Generation":
        """What comes as the answer. Raises UsageError."""
        from lowq_cli.engine import stream

        how = {**drawn, **self.how, "images": talk.pictures, "chat": talk.template}
        return stream(self.model, self.tokenizer, talk.prompt(message), **how)

    @staticmethod
    def answered(talk: Any, message: str, answer: Any) -> None:
        """Note the turn."""
        thoughts, text = thinking.split(answer.text, answer.marks)
        talk.answered(message, answer, text)
        talk.think_of(thoughts)


class ServerModel:
    """A running server of this user that has the model. Raises Declined if there is none."""

    def __init__(
        self, folder: str, given: dict[str, Any], device: str, kv: str, keep_alive: str | None, think: bool | None
    ) -> None:
        from lowq_cli import running
        from lowq_cli.engine.conversation import Turns
        from lowq_cli.generation.running_server import request_body

        def body(message: Any, drawn: dict[str, Any]) -> dict[str, Any]:
            settings = {**drawn, "kv": kv, "chat": False, "think": think}
            return request_body(folder, message, settings, drawn.get("seed", 0), "conversation", device)

        self.body, self.ask = body, running.ask
        reply = running.ask_or_leave(body(" ", {**given, "max_new_tokens": 0}), keep_alive, device)
        self.drawn, self.origins = reply.facts["sampling"], reply.facts["sampling_from"]
        self.begin, self.context = partial(Turns, reply.facts["template"]), reply.facts.get("context")
        self.where = f"answered by the running server (process {reply.facts['process']}); "
        for _ in reply:
            pass

    def answer(self, talk: Any, message: str, drawn: dict[str, Any]) -> "Reply":
        """The pieces of the answer. Raises LowqError, and Declined if the server has ended."""
        return self.ask(self.body(talk.request(message), drawn))

    @staticmethod
    def answered(talk: Any, message: str, answer: Any) -> None:
        """Note the turn."""
        thoughts, text = thinking.split(answer.text, answer.facts.get("marks"))
        talk.add(message, text)
        talk.think_of(thoughts)


def server_of(
    folder: str, given: dict[str, Any], device: str, kv: str, keep_alive: str | None, think: bool | None
) -> ServerModel | None:
    try:
        return ServerModel(folder, given, device, kv, keep_alive, think)
    except Declined as e:
        if keep_alive is not None:
            console.warn(f"no server is left running: {e}")
        return None
