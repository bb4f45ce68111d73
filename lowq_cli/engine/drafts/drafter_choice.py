"""Load the drafter that a name stands for, and attach it to a decoder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowq_cli.cached_models import DRAFTERS
from lowq_cli.engine.drafts.drafter import DeviceDrafter, HostDrafter, NoDrafts, PagedDrafter
from lowq_cli.engine.drafts.drafting import FromHost, OnDevice, is_large
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.model_record import DRAFT, owned
from lowq_cli.engine.plan import plan_of, why_not
from lowq_cli.files.source import HEAD_NOTES, check_there, open_source
from lowq_cli.state import user_path
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError
from lowq_packers.regular import MAX_CONFIG, read_text

# Devices on which "auto" means n-grams if no head was trained; on a GPU it does so in `generate` with large models (`is_large`)
BY_NGRAMS = ("cpu",)
LITTLE = 1.25  # tokens per step below which a head saves no time: a guess and its check take so many steps of an 8B (H200)


def check(draft: str) -> str:
    """Returns `draft`. Raises NotFoundError for an unknown name, and for a folder without a checkpoint."""
    if draft not in (*DRAFTERS, "demo") and "/" not in draft and not user_path(draft).exists():
        known = ", ".join(DRAFTERS)
        raise NotFoundError(f"--draft {draft} must be {known}, or a draft head or model: a folder, or a name of lowq ls")
    if draft not in DRAFTERS:
        check_there(draft)
    return draft


def settled(draft: str, device: str, large: bool = False) -> str:
    """The meaning of "auto" on a kind of device if no head was trained: "ngram" or "none"; other names stay unchanged.

    large: as `is_large` says of the model, in `generate`.
    """
    return ("ngram" if large or device in BY_NGRAMS else "none") if draft == "auto" else draft


def make(draft: str, model: Any, tokenizer: Any) -> HostDrafter | DeviceDrafter | None:
    """The drafter for one sequence of a model, or None: n-grams; for "auto" the head trained for the checkpoint if it has one
    that saves time (otherwise as `settled`); the checkpoint's MTP layer; or the head or model in a folder.

    Raises NotFoundError for a drafter that is not there, DamagedError for one that cannot be read, UnsupportedError for one
    that does not fit the model.
    """
    trained, device = Path(owned(model).tuned or "/nowhere") / DRAFT, model.device.type
    large = draft == "auto" and device == "cuda" and why_not(model) is None and is_large(plan_of(model))
    use_head = check(draft) == "auto" and trained.is_dir() and saves_time(_notes(trained), device)
    name = str(trained) if use_head else settled(draft, device, large)
    if name == "none":
        return None
    if name == "ngram":
        return NGram()
    drafters = owned(model).drafters
    if name not in drafters:
        drafters.clear()  # frees the memory of earlier drafters
        drafters[name] = _loaded(name, model, tokenizer)
    drafter: DeviceDrafter = drafters[name]
    return drafter


def saves_time(notes: Mapping[str, Any], device: str) -> bool:
    """Whether a head saves time by what its training recorded: the tokens per step and, if measured on this kind of device,
    the speed. A head without such a record, which someone copied there, counts as one that does."""
    speed = speeds(notes) if notes.get("device") == device else {}
    return notes.get("length", LITTLE) >= LITTLE and (not speed or speed["with"] > speed["without"])  # type: ignore[no-any-return]


def speeds(notes: Mapping[str, Any]) -> dict[str, float]:
    """Tokens/s "without" drafts and "with" the head, as measured after its training; empty if they were not. Heads of lowq
    before 2026-12 have them as a list in this order."""
    speed = notes.get("speed") or {}
    return dict(zip(("without", "with"), speed, strict=True)) if isinstance(speed, list) else speed


def _notes(folder: Path) -> dict[str, Any]:
    """What the training of the head in a folder recorded. Raises DamagedError where that is not what it writes."""
    file = folder / HEAD_NOTES
    if not file.is_file():
        return {}
    try:
        notes: dict[str, Any] = json.loads(read_text(file, MAX_CONFIG))
        saves_time(notes, notes.get("device", ""))
    except (ValueError, TypeError, AttributeError, LookupError) as e:
        raise DamagedError(f"{file} is not what lowq draft train writes ({e}); remove {folder}") from None
    return notes


def served(draft: str, model: Any, tokenizer: Any) -> str | PagedDrafter:
    """The drafter of `make` for the server's engine: "none", "ngram", or a drafter on the device. On a GPU "auto" does not
    choose a head, because heads have not been measured in the server there."""
    drafter: Any = make(draft if model.device.type in BY_NGRAMS else settled(draft, model.device.type), model, tokenizer)
    return "none" if drafter is None else drafter if hasattr(drafter, "go_on") else drafter.name


def _loaded(name: str, model: Any, tokenizer: Any) -> DeviceDrafter:
    from lowq_cli.engine.drafts import heads
    from lowq_cli.engine.drafts import model as models

    if name == "mtp":
        if (inside := heads.inside(model)) is None:
            raise UnsupportedError(
                "the checkpoint has no MTP layer that lowq runs; leave --draft mtp out, or name a draft model"
            )
        return inside
    with open_source(name) as source:
        is_head = heads.takes(source.config)
    return heads.load(name, model) if is_head else models.load(name, model, tokenizer)


def attach(
    draft: str, model: Any, tokenizer: Any, decoder: Any, texts: int, same: bool = False
) -> tuple[FromHost | OnDevice | None, str]:
    """(drafting of a decoder with a batch of `texts` sequences, or None; the reason for None). same: as of `Drafting`."""
    drafter, refusal = make(draft, model, tokenizer), getattr(decoder, "why_no_drafts", None)
    if drafter is None and same and model.device.type != "cpu":
        drafter = NoDrafts()  # its steps have as many rows as those with drafts
    nothing = "as asked" if draft == "none" else "auto drafts by n-grams on a CPU and for large models; try --draft ngram"
    why = nothing if drafter is None else f"decoder {decoder.name} takes none" if refusal is None else refusal(texts)
    device = drafter if hasattr(drafter, "draft") and not why else None
    if refusal is not None:
        decoder.drafts = not why
        decoder.attach(device)
    if drafter is None or why:
        return None, f"none: {why}"
    return OnDevice(device, decoder, same) if device is not None else FromHost(drafter, decoder, same), ""  # type: ignore[arg-type]
