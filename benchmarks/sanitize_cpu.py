"""Run g++'s address and undefined-behaviour sanitizers over the CPU kernels: `benchmarks/sanitize_cpu.py [-k WORDS ...]`.

Their tests run again on a library built with both: every width, table, group, kind of zero and odd shape, on each instruction
set that this CPU has and AVX-512 emulated, x, weights and results allocated one by one, so that an access past the end of one
is seen. Further arguments go to pytest. Exits as it does; the first finding ends it, with where it is on stderr.
"""

import os
import subprocess
import sys
from pathlib import Path

from lowq_kernels.products.cpu import building

ROOT = Path(__file__).parent.parent
NAMES = ("test_cpu_packed.py", "test_cpu_tables.py", "test_cpu_step.py", "test_kv_cpu.py", "test_cpu_emulated.py")
TESTS = [f"tests/kernels/{name}" for name in NAMES]
TESTS += [f"--deselect={TESTS[-1]}::test_products_against_the_definition[neon"]  # a static program cannot have them
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0", "-g1")  # -O1: minutes a file
RUN = f"""
import sys, pytest
from lowq_kernels.products.cpu import building, native
building.FLAGS += {FLAGS}
assert native.library(), native.why_not()
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def main() -> int:
    """Run the tests in a process that has the sanitizers loaded before anything else."""
    cxx = building.compiler() or "g++"
    found = [
        subprocess.check_output([cxx, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    # python and torch keep memory to their ends
    options = {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", RUN, *TESTS, *sys.argv[1:]], env=os.environ | options, cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
