"""What a model's README.md says in front of its text, in the YAML that huggingface.co reads: whose licence it is under."""

import re
from pathlib import Path

from lowq_packers.errors import LowqError
from lowq_packers.regular import MAX_CONFIG, read_text

README = "README.md"
LICENSE = ("license", "license_name", "license_link")
VALUE = r"""["']?([\w.:/#?&=%+-]{1,200})["']?"""  # a name or an address: what else a card holds is not repeated


def license_of(folder: Path) -> dict[str, str]:
    """license, license_name and license_link of the README.md in a folder; empty where it has none that can be read."""
    try:
        text = read_text(folder / README, MAX_CONFIG) if (folder / README).is_file() else ""
    except LowqError:
        return {}
    front = re.match(r"---\r?\n(.*?)\r?\n---\s", text, re.DOTALL)
    found = {k: re.search(rf"^{k}:\s*(?:\n?\s*-\s+)?{VALUE}\s*$", front[1], re.M) if front else None for k in LICENSE}
    return {k: m[1] for k, m in found.items() if m}
