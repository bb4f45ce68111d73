"""Compare lowq with llama.cpp on this CPU: decoding, a prompt, a batch, peak memory, seconds to the first token.

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-bench llama-quantize
    python benchmarks/cpu_llamacpp.py --llama-bench build/bin/llama-bench --out FILE.json NAME=CHECKPOINT[,FILE.gguf] ...

A pair is one model at equal bits with an equal head: `lowq quantize --group 32 --zero none --lm-head keep --layout cpu`, and
`lowq export --to gguf` of the same gives 8 bits (Q8_0) and 4 (Q4_0), `llama-quantize --token-embedding-type bf16` Q2_K. A
checkpoint without a file is timed alone.

Both are timed inside their processes after a warm-up of the same work, --repeats times each, in rounds that take turns: a round
is the best of its repeats, the tables take the best of the rounds. Another call with the same --out adds rounds to what is
there, so that pieces fit into quiet minutes. Peak memory is what the system reports of the process, mapped files included.
--first CHECKPOINT times a shell's `lowq generate` of one token,
and `import torch` beside it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PROMPT, NEW, BATCH, STEPS = 512, 64, 8, 16  # STEPS of the batch
LOWQ = """
import json, resource, sys, time, torch
from lowq_cli.engine import explain
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.sampling import Sampling
from lowq_kernels.products.cpu import native
model, _ = ready(sys.argv[1], "cpu")
prompt, new, batch, steps, repeats = map(int, sys.argv[2:7])
decoder, found = NativeDecoder(model), {}

def clock(tokens, times, work, start=lambda: None):
    best = 0
    for i in range(repeats):
        start()
        if i == 0:
            work()
        since = time.perf_counter()
        for _ in range(times):
            work()
        best = max(best, tokens * times / (time.perf_counter() - since))
    return best

def ids(n, seed):
    return torch.randint(5, 5000, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

found["threads"] = torch.get_num_threads()
found["decode"] = clock(1, new, decoder.step, lambda: decoder.start([ids(1, 0)], Sampling(), new + 2))
found["read_bytes"] = explain.bytes_per_token(model, decoder, 1)
seeds = iter(range(99))
found["prompt"] = clock(prompt, 1, lambda: decoder.start([ids(prompt, next(seeds))], Sampling(), 1))
found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
texts = [ids(1, b) for b in range(batch)]
found["batch"] = clock(batch, steps, decoder.step, lambda: decoder.start(texts, Sampling(), steps + 2))
found["isa"] = native.isa()[1]
from lowq_kernels.dispatch.timing import roofline
found["read_gbs"] = roofline(torch.device("cpu")).read_gbs
print(json.dumps(found))
"""


def cpu_name() -> str:
    """As the system calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def run(command: list[str]) -> tuple[float, float, str]:
    """(seconds, peak MB, stdout) of a process."""
    since = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command[:3])} ... ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - since, used.ru_maxrss / 1024, out


def llama(bench: str, gguf: str, threads: int, repeats: int) -> dict[str, float]:
    """One round of llama.cpp."""
    sizes = ["-p", str(PROMPT), "-n", str(NEW), "-t", str(threads), "-r", str(repeats), "-o", "json"]
    _, peak, out = run([bench, "-m", gguf, *sizes])
    speeds = {"prompt" if test["n_prompt"] else "decode": max(test["samples_ts"]) for test in json.loads(out)}
    return speeds | {"peak_mb": peak}


def lowq(folder: str, repeats: int) -> dict[str, float]:
    """One round of lowq."""
    return json.loads(run([sys.executable, "-P", "-c", LOWQ, folder, *map(str, (PROMPT, NEW, BATCH, STEPS, repeats))])[2])


def first(folder: str) -> dict[str, float]:
    """One round from the shell to the first token."""
    code = "from lowq_cli.main import run; run()"
    words = ["generate", folder, "--prompt", "Once", "--max-new-tokens", "1", "--device", "cpu"]
    torch_s = run([sys.executable, "-P", "-c", "import torch"])[0]
    return {"torch_s": torch_s, "first_s": run([sys.executable, "-P", "-c", code, *words])[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="NAME=CHECKPOINT[,FILE.gguf]")
    parser.add_argument("--llama-bench", default="llama-bench")
    parser.add_argument("--llama-version", default="", help="to be noted in the results")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--first", metavar="NAME=CHECKPOINT")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    facts = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": given.threads, "load": []}
    report: dict[str, Any] = {"prompt": PROMPT, "new": NEW, "batch": BATCH, "machine": facts, "rounds": {}, "first": {}}
    if given.out.exists():
        report = json.loads(given.out.read_text())
    report["machine"]["load"].append(round(os.getloadavg()[0], 1))  # of the minute before: this script's own is not in it
    report["versions"] = {"lowq": version("lowq"), "torch": torch.__version__, "llama.cpp": given.llama_version}

    def keep(kind: str, name: str, found: dict[str, Any]) -> None:
        report[kind].setdefault(name, []).append(found)
        report["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        print(name, json.dumps(found), flush=True)
        given.out.write_text(json.dumps(report, indent=1) + "\n")

    for _ in range(given.rounds):
        for name, files in (p.split("=") for p in given.pairs):
            folder, _, gguf = files.partition(",")
            theirs = {"llama.cpp": llama(given.llama_bench, gguf, given.threads, given.repeats)} if gguf else {}
            keep("rounds", name, theirs | {"lowq": lowq(folder, given.repeats)})
        if given.first:
            name, folder = given.first.split("=")
            keep("first", name, first(folder))


if __name__ == "__main__":
    main()
