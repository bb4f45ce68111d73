"""Upload a checkpoint to the hub: its files, and the card made by `card.model_card`."""

import glob
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowq_cli.files.checkpoint import Checkpoint, open_checkpoint
from lowq_cli.files.resolution import is_own
from lowq_cli.files.safetensors_io import check_file_name
from lowq_cli.files.source import CONFIG, JOURNAL, LOG, REPORT
from lowq_cli.files.weight_files import INDEX
from lowq_cli.interop.card import CARD, model_card
from lowq_cli.state import as_argument
from lowq_kernels.dispatch import tuning
from lowq_packers.errors import DamagedError, NotFoundError, UsageError, is_no_refusal

REPO = re.compile(r"(?!.{97})(?!.*(--|\.\.))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)  # ids that the hub accepts


def publish(
    checkpoint: str | os.PathLike[str],
    repo: str,
    against: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    measure: Callable[[Path], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Upload a checkpoint's files and card to `repo`: {url, files, card}. dry_run: upload nothing, url is None.

    measure: returns `perplexity.Report`'s fields of a folder compared with the model `against`, for the card.

    Raises UsageError for an invalid repository name, NotFoundError if the hub refuses or cannot be reached.
    """
    if not REPO.fullmatch(repo):
        folder = f"; {repo} itself is a folder here: --ckpt {as_argument(repo)} uploads it" if Path(repo).is_dir() else ""
        raise UsageError(f"{repo!r} is not a repository; write it as name/model{folder}")
    with (opened := open_checkpoint(checkpoint)).source:
        if not dry_run:
            _check_logged_in()
        card = model_card(opened, repo, against, measure(opened.folder) if measure else None)
        files = _files(opened)
        url = None if dry_run else _send(opened.folder, files, repo, private, card)
    return {"url": url, "files": [*files, CARD], "card": card}


def _files(checkpoint: Checkpoint) -> list[str]:
    """The files to upload: those listed in the report (without a list: the files of a checkpoint), and the tuning table.

    Raises DamagedError for a listed file that is missing or outside the folder.
    """
    written = {CONFIG, *checkpoint.source.files, *(p.name for p in checkpoint.source.companions())}
    optional = {n for n in (REPORT, INDEX, tuning.FILE) if (checkpoint.folder / n).is_file()}
    listed = {check_file_name(name, REPORT) for name in checkpoint.report.get("files") or written}
    for name in sorted(listed | optional):
        if not (checkpoint.folder / name).is_file():
            raise DamagedError(f"{checkpoint.folder / name} is missing, which {REPORT} lists; quantize again")
        if not is_own(checkpoint.folder / name):
            raise DamagedError(
                f"{checkpoint.folder / name} is a link to a file outside, which lowq does not upload; copy it there"
            )
    return sorted((listed | optional) - {CARD, LOG, JOURNAL})


def _check_logged_in() -> None:
    """Raise NotFoundError before the measurement if the hub would refuse the upload."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise NotFoundError("you are not logged in to the hub; run: hf auth login (or set HF_TOKEN)")


def _send(folder: Path, files: list[str], repo: str, private: bool, card: str) -> str:
    """Create the repository if it does not exist, and upload; returns its URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        only = [glob.escape(name) for name in files]
        api.upload_folder(repo_id=repo, folder_path=str(folder), allow_patterns=only, commit_message="Upload with lowq")
        api.upload_file(
            path_or_fileobj=card.encode(), path_in_repo=CARD, repo_id=repo, commit_message="Model card from the report"
        )
    except Exception as e:  # the hub's client has a type per refusal; the first line has the reason
        if is_no_refusal(e):
            raise
        reason = str(e).strip().splitlines()
        raise NotFoundError(
            f"the hub refused {repo}: {reason[0] if reason else type(e).__name__}; check the name, or: hf auth login"
        ) from e
    return str(url)
