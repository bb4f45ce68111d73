"""A program that has started lowq's processes ends when its last line is done, and they end with it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_engine_process import gone

ROOT = Path(__file__).parents[2]
ENGINE = """
import counting
from lowq_cli.serving.engine_process import ApartEngine
engine = ApartEngine(counting.make)
engine.made()
engine.start(print)
"""
STANDBY = """
from lowq_cli.serving.engine_process import Standby
engine = Standby()
"""
MASKS = """
from saying import byte_tokenizer
from lowq_cli.serving.mask_process import MaskProcess
import llguidance
masks = MaskProcess(byte_tokenizer(), [256], 320)
mask = masks.mask(llguidance.LLMatcher.grammar_from_lark("start: /ab*/"))
engine = masks._running
"""
PICTURES = """
from lowq_cli.serving.http.pictures import PictureReader
reader = PictureReader("/nowhere", None)
engine, = reader.processes
"""
BEGINS = f"""import signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as in an engine's process, which starts others
"""


def program(body):
    """The source of a program that prints the id of a process of lowq's, and is done."""
    lines = [*body.strip().splitlines(), "print(engine.process.pid, flush=True)", "sys.stdin.readline()"]
    return f"{BEGINS}if __name__ == '__main__':\n" + "\n".join(f"    {line}" for line in lines)


@pytest.mark.parametrize("stops", [False, True], ids=["runs", "stopped"])
@pytest.mark.parametrize("body", [ENGINE, STANDBY, MASKS, PICTURES], ids=["engine", "standby", "masks", "pictures"])
def test_a_program_ends_though_it_stopped_nothing(body, stops, tmp_path):
    if body is MASKS:
        pytest.importorskip("llguidance", reason="masks need the extra lowq[grammar]")
    file = tmp_path / "program.py"
    file.write_text(program(body))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, file], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as other:
        try:
            pid = int(other.stdout.readline())
            if stops:
                os.kill(pid, signal.SIGSTOP)
            _, said = other.communicate("done\n", timeout=60)
        finally:
            other.kill()
        assert (other.returncode, said) == (0, "")
        assert gone(pid)


def test_all_processes_of_the_library_are_started_by_the_function_that_ends_them():
    """Others wait for multiprocessing's end, as those above would."""
    starts = re.compile(r"\bProcess\(|\bPool\(|ProcessPoolExecutor\(|os\.fork\(")
    files = [p for folder in ("lowq_cli", "kernels", "packers") for p in (ROOT / folder).rglob("*.py")]
    found = {str(p.relative_to(ROOT)): starts.findall(p.read_text()) for p in files}
    assert {name: of for name, of in found.items() if of} == {
        "lowq_cli/serving/processes.py": ["Process("],
        "kernels/dispatch/precompile.py": ["Pool("],  # left, and so ended, before the function that makes it returns
    }
