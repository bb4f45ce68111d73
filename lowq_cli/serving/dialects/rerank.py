"""/v1/rerank in the format of Cohere, Jina and vLLM: orders documents by the model's judgement of how well they answer a query.

The prompt asks the model for yes or no, in the words that Qwen's rerankers were trained on. A document's score is
p(yes) / (p(yes) + p(no)).
"""

import math
from dataclasses import dataclass
from typing import Any

from lowq_cli.engine.ranges import INT64, Range
from lowq_cli.serving.http import fields
from lowq_cli.serving.http.fields import boolean, inside, items, text
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.request import MOST_LOGPROBS, Likelihood

MOST = 1000  # max. documents of a request
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
YES, NO = "yes", "no"
FIELDS = {"model", "query", "documents", "top_n", "return_documents", "instruction", "max_tokens_per_doc", "user", "priority"}


@dataclass(frozen=True)
class Ranking:
    """A parsed body."""

    query: str
    documents: list[str]
    instruction: str
    top: int | None
    whole: bool

    def chat(self, document: str) -> fields.Params:
        """The prompt for one document, as a chat."""
        prompt = f"<Instruct>: {self.instruction}\n<Query>: {self.query}\n<Document>: {document}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": prompt}]
        return fields.read({"messages": messages, "reasoning_effort": "none"}, chat=True)


def read(body: dict[str, Any]) -> Ranking:
    """Parse a body. Raises Refusal."""
    fields.known("", body, FIELDS)
    documents = []
    for i, given in enumerate(items("documents", body.get("documents"))):
        document = given.get("text") if isinstance(given, dict) else given
        documents.append(text(f"documents[{i}]", document))
    if len(documents) > MOST:
        raise wrong("documents", f"{len(documents)} documents; a request may have {MOST}")
    top = body.get("top_n")
    return Ranking(
        text("query", body.get("query")),
        documents,
        text("instruction", body.get("instruction") or INSTRUCT),
        None if top is None else int(inside(Range(1, INT64, whole=True))("top_n", top)),
        boolean("return_documents", body.get("return_documents") or False),
    )


def score(first: Likelihood, spelled: Any) -> float:
    """p(yes) / (p(yes) + p(no)) from the likeliest first tokens of an answer. spelled: returns a token's text."""
    shares = {YES: 0.0, NO: 0.0}
    for token, logprob in first[1][:MOST_LOGPROBS]:
        word = spelled(token).strip().lower()
        if word in shares:
            shares[word] += math.exp(logprob)
    return shares[YES] / sum(shares.values()) if any(shares.values()) else 0.0


def whole(model: str, scores: list[float], ranking: Ranking, tokens: int) -> dict[str, Any]:
    """The response with the documents, best first."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: ranking.top]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if ranking.whole:
        results = [r | {"document": {"text": ranking.documents[r["index"]]}} for r in results]
    return {"object": "list", "model": model, "results": results, "usage": {"total_tokens": tokens, "prompt_tokens": tokens}}
