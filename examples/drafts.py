"""Several tokens in one step: n-grams of the text so far guess the next tokens, the model checks them all at once.

The text is the same as without drafts. `--draft DIR` of generate, chat and serve takes a draft head or a draft model instead.
"""

import lowq

PROMPT = "one two three four five six seven eight nine ten " * 6


def main() -> None:
    model, tokenizer = lowq.load("demo", device="cpu")
    texts = {how: lowq.stream(model, tokenizer, PROMPT, max_new_tokens=48, draft=how) for how in ("none", "ngram")}
    for how, text in texts.items():
        list(text)  # the attributes are filled in while the text is read
        print(f"--draft {how:6} {len(text.tokens[0])} tokens in {text.steps + 1} steps")
    assert texts["none"].tokens == texts["ngram"].tokens
    assert texts["ngram"].steps <= texts["none"].steps


if __name__ == "__main__":
    main()
