"""/tokenize and /detokenize, with the field names of vLLM and llama.cpp."""

from typing import Any

from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.serving.http import fields
from lowq_cli.serving.http.fields import boolean, text, whole
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.http.served_model import ServedModel


def to_tokenize(body: dict[str, Any]) -> fields.Params | None:
    """The conversation to tokenize; None if the body has a text instead. Raises Refusal."""
    if "messages" in body:
        chat_fields = ("messages", "tools", "chat_template_kwargs", "model", "reasoning_effort")
        return fields.read({name: body[name] for name in chat_fields if name in body}, chat=True)
    if "prompt" not in body and "content" not in body:
        raise wrong("prompt", "is needed, or messages")
    return None


def of_text(tokenizer: LoadedTokenizer, body: dict[str, Any]) -> list[int]:
    """The tokens of a text, with the special tokens that the tokenizer adds unless the body turns them off."""
    name = "prompt" if "prompt" in body else "content"
    # llama.cpp's fields are `content` and `add_special`, which is off by default
    add = body.get("add_special_tokens", body.get("add_special", name == "prompt"))
    return list(tokenizer(text(name, body[name]), add_special_tokens=boolean("add_special_tokens", add))["input_ids"])


def response(model: ServedModel, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
    """The response with the token ids, their count and the context's limit."""
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.engine.limits.longest, "tokens": ids}
    if body.get("return_token_strs"):
        answer["token_strs"] = [model.names.of(i)[0] for i in ids]
    if body.get("with_pieces"):
        answer["tokens"] = [{"id": i, "piece": model.names.of(i)[0]} for i in ids]
    return answer


def to_detokenize(body: dict[str, Any]) -> list[int]:
    """The token ids of a body. Raises Refusal."""
    given = body.get("tokens")
    if not isinstance(given, list):
        raise wrong("tokens", "must be an array of token ids")
    return [whole(f"tokens[{i}]", t) for i, t in enumerate(given)]
