"""Read the licence from the YAML front matter of a model's README.md, as huggingface.co does."""

import re
from pathlib import Path

from lowq_packers.errors import LowqError
from lowq_packers.regular import MAX_CONFIG, read_text

README = "README.md"
LICENSE = ("license", "license_name", "license_link")
VALUE = r"""["']?([\w.:/#?&=%+-]{1,200})["']?"""  # a name or a URL; other values of a card are not copied


def license_of(folder: Path) -> dict[str, str]:
    """license, license_name and license_link of the README.md in a folder; empty if none can be read."""
    try:
        text = read_text(folder / README, MAX_CONFIG) if (folder / README).is_file() else ""
    except LowqError:
        return {}
    front = re.match(r"---\r?\n(.*?)\r?\n---\s", text, re.DOTALL)
    matches = {k: re.search(rf"^{k}:\s*(?:\n?\s*-\s+)?{VALUE}\s*$", front[1], re.M) if front else None for k in LICENSE}
    return {k: m[1] for k, m in matches.items() if m}
