"""Which drafter a name means, and a decoder that takes it."""

from pathlib import Path
from typing import Any

from lowq_cli.engine.drafts.drafter import DeviceDrafter, HostDrafter, PagedDrafter
from lowq_cli.engine.drafts.drafting import FromHost, OnDevice
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.model_record import owned
from lowq_cli.files.source import check_there, open_source
from lowq_cli.state import user_path
from lowq_packers.errors import UnsupportedError, UsageError

NAMES = ("auto", "ngram", "mtp", "none")
# Devices on which "auto" is n-grams where no head was trained. On a GPU it is nothing: with base in 16 bits on an H100 they
# took 0.9 to 0.97 of the speed where texts copy (2026-11-26), and what was changed after that has not run there.
BY_NGRAMS = ("cpu",)
OWN = "draft"  # the folder beside a checkpoint's files where `lowq draft train` writes its head


def check(draft: str) -> str:
    """A way to draft, as it is. Raises UsageError where it is no known name, NotFoundError where no checkpoint is there."""
    if draft not in (*NAMES, "demo") and "/" not in draft and not user_path(draft).exists():
        raise UsageError(f"--draft {draft}: it can be {', '.join(NAMES)}, or the folder of a draft head or model")
    if draft not in NAMES:
        check_there(draft)
    return draft


def settled(draft: str, device: str) -> str:
    """What "auto" is on a kind of device where no head was trained: "ngram" or "none"; any other name as it is."""
    return ("ngram" if device in BY_NGRAMS else "none") if draft == "auto" else draft


def make(draft: str, model: Any, tokenizer: Any) -> HostDrafter | DeviceDrafter | None:
    """What drafts for one text of a model, or None for nothing: guesses by n-grams; the head that was trained for the
    checkpoint, with "auto" where it has one (else `settled`); its own MTP layer; a head's or a model's folder.

    Raises UsageError for an unknown name, UnsupportedError and DamagedError for what does not fit the model.
    """
    trained = Path(owned(model).tuned or "/nowhere") / OWN
    name = str(trained) if check(draft) == "auto" and trained.is_dir() else settled(draft, model.device.type)
    if name == "none":
        return None
    if name == "ngram":
        return NGram()
    known = owned(model).drafters
    if name not in known:
        known.clear()  # their memory goes with them
        known[name] = _loaded(name, model, tokenizer)
    found: DeviceDrafter = known[name]
    return found


def served(draft: str, model: Any, tokenizer: Any) -> str | PagedDrafter:
    """What `make` gives as the server's engine takes it: "none", "ngram", or a drafter on the device. On a GPU "auto" takes no
    head: none has been measured in the server there."""
    made: Any = make(draft if model.device.type in BY_NGRAMS else settled(draft, model.device.type), model, tokenizer)
    return "none" if made is None else made if hasattr(made, "go_on") else made.name


def _loaded(name: str, model: Any, tokenizer: Any) -> DeviceDrafter:
    from lowq_cli.engine.drafts import heads
    from lowq_cli.engine.drafts import model as models

    if name == "mtp":
        if (found := heads.inside(model)) is None:
            raise UnsupportedError("the checkpoint has no MTP layer that is run; leave --draft mtp out, or name a draft model")
        return found
    with open_source(name) as source:
        is_head = heads.takes(source.config)
    return heads.load(name, model) if is_head else models.load(name, model, tokenizer)


def attach(draft: str, model: Any, tokenizer: Any, decoder: Any, texts: int) -> tuple[FromHost | OnDevice | None, str]:
    """(how a decoder of so many texts is given drafts, or None; why not)."""
    drafter, asked = make(draft, model, tokenizer), getattr(decoder, "why_no_drafts", None)
    nothing = "as asked" if draft == "none" else f"auto drafts by n-grams on {', '.join(BY_NGRAMS)} alone; --draft ngram does"
    why = nothing if drafter is None else f"decoder {decoder.name} takes none" if asked is None else asked(texts)
    device = drafter if hasattr(drafter, "draft") and not why else None
    if asked is not None:
        decoder.drafts = not why
        decoder.attach(device)
    if drafter is None or why:
        return None, f"none: {why}"
    return OnDevice(device, decoder) if device is not None else FromHost(drafter, decoder), ""  # type: ignore[arg-type]
