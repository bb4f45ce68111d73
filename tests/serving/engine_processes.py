"""Finds the processes of a server's engines."""

from pathlib import Path


def engines_of(server):
    """Ids of the engines' processes of a server's process, the oldest first; the last may stand by for the next model."""
    result = set()
    for task in Path(f"/proc/{server}/task").iterdir():  # each is a child of the thread that started it
        result.update(map(int, (task / "children").read_text().split()))
    return [pid for pid in sorted(result) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
