"""Finds the processes of a server's engines."""

from pathlib import Path


def engines_of(server):
    """Ids of the engines' processes of a server's process, the oldest first; the last may stand by for the next model."""
    return [pid for pid in children(server) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def below(process):
    """Ids of all processes that a process and its children started."""
    return [pid for child in children(process) for pid in (child, *below(child))]


def children(process):
    result = set()
    for task in Path(f"/proc/{process}/task").iterdir():  # each is a child of the thread that started it
        result.update(map(int, (task / "children").read_text().split()))
    return sorted(result)
