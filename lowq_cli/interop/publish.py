"""Sending a checkpoint to the hub: its files, and the card that `card.model_card` writes."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import JOURNAL, LOG
from lowq_cli.interop.card import CARD, model_card
from lowq_packers.errors import NotFoundError, UsageError

REPO = re.compile(r"[\w.-]+/[\w.-]+")
LEFT_OUT = (LOG, JOURNAL, CARD)


def publish(
    checkpoint: str | os.PathLike[str],
    repo: str,
    against: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    measure: Callable[[Path], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Upload a checkpoint's files and card to `repo`: {url, files, card}. dry_run: send nothing, url is None.

    measure: `perplexity.Report`'s fields of a folder held against the model `against`, for the card.

    Raises UsageError for a name that is no repository, NotFoundError where the hub refuses or is not reached.
    """
    if not REPO.fullmatch(repo):
        raise UsageError(f"{repo!r} is no repository; write it as name/model")
    with (found := open_checkpoint(checkpoint)).source:
        if not dry_run:
            _check_logged_in()
        card = model_card(found, repo, against, measure(found.folder) if measure else None)
        files = sorted(p.name for p in found.folder.iterdir() if p.is_file() and p.name not in LEFT_OUT)
        url = None if dry_run else _send(str(found.folder), repo, private, card)
    return {"url": url, "files": [*files, CARD], "card": card}


def _check_logged_in() -> None:
    """Raise NotFoundError now where the hub would refuse after all was measured."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise NotFoundError("you are not logged in to the hub; run: hf auth login (or set HF_TOKEN)")


def _send(folder: str, repo: str, private: bool, card: str) -> str:
    """Create the repository if it is not there and upload; its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, ignore_patterns=[*LEFT_OUT, "*.partial"], commit_message="Upload with lowq"
        )
        api.upload_file(
            path_or_fileobj=card.encode(), path_in_repo=CARD, repo_id=repo, commit_message="Model card from the report"
        )
    except Exception as e:  # every refusal of the hub is its own type
        reason = str(e).strip().splitlines()
        raise NotFoundError(
            f"the hub did not take {repo}: {reason[0] if reason else type(e).__name__}; check the name, or: hf auth login"
        ) from e
    return str(url)
