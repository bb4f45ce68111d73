"""Tokenizers of every class that publishers use, trained on the bundled texts: 400 tokens, the real splits and decoders.

Special tokens stand before the vocabulary (SentencePiece, WordPiece, tekken) or behind it (byte-level BPE), as published.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lowq_cli.files.source import DEMO

SIZE = 400
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = WORDS.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", r"[!-/:-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|\s+(?!\S)|\s+")


@cache
def text() -> str:
    return (DEMO / "sample.txt").read_text()[:30000]


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(p), "isolated", False) for p in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _bytes(pre: pre_tokenizers.PreTokenizer, first: Sequence[str] = (), **model: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text()], trainers.BpeTrainer(vocab_size=SIZE, special_tokens=[*first], initial_alphabet=ALPHABET, show_progress=False)
    )
    return tokenizer


def _nfc(made: Tokenizer) -> Tokenizer:
    made.normalizer = normalizers.NFC()
    return made


def _sentencepiece(first: Sequence[str], leading: bool) -> Tokenizer:
    """BPE over ▁words with a token for each byte. leading: a text begins with a space, as in Llama 2 and not in Gemma."""
    pieces = [*first, *(f"<0x{b:02X}>" for b in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if leading else space
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=len(pieces) + 160, special_tokens=pieces, show_progress=False)
    trained.train_from_iterator([text()], trainer)
    facts = json.loads(trained.to_str())
    facts["added_tokens"] = [t for t in facts["added_tokens"] if t["content"] in first]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(facts))
    tokenizer.pre_tokenizer = None if leading else pre_tokenizers.Split(" ", "merged_with_previous")  # type: ignore[assignment]
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _unigram(first: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=SIZE, special_tokens=[*first], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(text().split("\n"), trainer)
    facts = json.loads(tokenizer.to_str())
    facts["model"]["vocab"] += [[f"<0x{b:02X}>", -20.0] for b in range(256)]
    facts["model"] |= {"byte_fallback": True, "unk_id": list(first).index("<unk>")}
    tokenizer = Tokenizer.from_str(json.dumps(facts))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def _wordpiece(first: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(lowercase=False),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.train_from_iterator(
        [text()], trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=[*first], show_progress=False)
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


KINDS: dict[str, Callable[[Sequence[str]], Tokenizer]] = {
    "gpt2": lambda first: _bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), first),
    "digits": lambda first: _bytes(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        first,
    ),
    "llama3": lambda first: _bytes(_split(WORDS % "{1,3}"), first, ignore_merges=True),
    "qwen": lambda first: _nfc(_bytes(_split(WORDS % ""), first)),
    "qwen35": lambda first: _nfc(_bytes(_split(MARKS % ""), first)),
    "o200k": lambda first: _bytes(_split(CASES % "{1,3}"), first),
    "tekken": lambda first: _bytes(_split(CASES % ""), first, ignore_merges=True),
    "deepseek": lambda first: _bytes(_split(*DEEPSEEK), first),
    "neox": lambda first: _nfc(_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), first)),
    "llama2": lambda first: _sentencepiece(first, leading=True),
    "gemma": lambda first: _sentencepiece(first, leading=False),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}
FIRST = ("llama2", "gemma", "unigram", "wordpiece", "tekken")  # kinds whose special tokens have the lowest ids


@cache
def _trained(kind: str, first: tuple[str, ...]) -> str:
    return KINDS[kind](first).to_str()


def tokenizer(kind: str, special: Sequence[str], plain: Sequence[str] = (), bos: str = "") -> Tokenizer:
    """A tokenizer with these special tokens, and others that are added but not special.

    bos: the token that begins every text, where the file's own post-processor writes it.
    """
    tokenizer = Tokenizer.from_str(_trained(kind, tuple(special) if kind in FIRST else ()))
    if kind not in FIRST:
        tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer
