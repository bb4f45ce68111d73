"""lowq beside llama.cpp on this CPU: decoding, a prompt and peak memory, in rounds that take turns.

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-bench llama-quantize
    python benchmarks/cpu_llamacpp.py --llama-bench build/bin/llama-bench --out FILE.json NAME=CHECKPOINT,FILE.gguf ...

A pair is one model at equal bits with an equal head: `lowq quantize --group 32 --zero none --lm-head keep` and `lowq export
--to gguf` of it give 8 bits (Q8_0) and 4 (Q4_0), `llama-quantize --token-embedding-type bf16` Q2_K.

Noted are seconds of CPU time of all threads, which other work on the machine changes least; the tables take the least of the
rounds. llama-bench runs in fresh processes, without its warm-up: what a token takes is the difference of two lengths, and the
prompt's start is taken off by it. lowq's are timed inside its process. Peak memory is what the system reports of the process,
mapped files included.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

SHORT, LONG = 8, 72  # tokens decoded
PROMPT = 512
LOWQ = """
import json, sys, time, torch
from lowq_cli.engine.fused import FusedDecoder
from lowq_cli.engine.ready import ready
from lowq_cli.engine.sampling import Sampling
model, _ = ready(sys.argv[1], "cpu")
decoder, found = FusedDecoder(model), {}
for tokens in (8, int(sys.argv[3])):
    ids = torch.randint(5, 5000, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    since = time.process_time()
    decoder.start([ids], Sampling(), int(sys.argv[2]) + 2)
    found["read"] = time.process_time() - since
    if tokens == 8:
        for _ in range(2):
            decoder.step()
        since = time.process_time()
        for _ in range(int(sys.argv[2])):
            decoder.step()
        found["new"] = time.process_time() - since
print(json.dumps(found))
"""


def cpu_name() -> str:
    """As the system calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def cpu_seconds(command: list[str]) -> tuple[float, float, str]:
    """(CPU seconds, peak MB, stdout) of a process and its threads."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command[:3])} ... ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, out


def llama(bench: str, gguf: str, threads: int) -> dict[str, float]:
    """One round of llama.cpp."""

    def run(prompt: int, new: int) -> tuple[float, float]:
        sizes = ["-p", str(prompt), "-n", str(new), "-t", str(threads)]
        return cpu_seconds([bench, "-m", gguf, *sizes, "-r", "1", "--no-warmup"])[:2]

    short, long, read = run(0, SHORT), run(0, LONG), run(PROMPT, 0)
    return {"short": short[0], "long": long[0], "read": read[0], "peak_mb": max(long[1], read[1])}


def lowq(folder: str) -> dict[str, float]:
    """One round of lowq."""
    _, peak, out = cpu_seconds([sys.executable, "-c", LOWQ, folder, str(LONG - SHORT), str(PROMPT)])
    return {**json.loads(out), "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="NAME=CHECKPOINT,FILE.gguf")
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--llama-version", default="", help="to be noted in the results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    pairs = [(name, *files.split(",")) for name, files in (p.split("=") for p in given.pairs)]
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name, *_ in pairs}
    for _ in range(given.rounds):
        for name, folder, gguf in pairs:
            both = {"llama.cpp": llama(given.llama_bench, gguf, given.threads), "lowq": lowq(folder)}
            rounds[name].append(both)
            print(name, json.dumps(both), flush=True)
            facts = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": given.threads, "load": round(os.getloadavg()[1], 1)}
            versions = {"lowq": version("lowq"), "torch": torch.__version__, "llama.cpp": given.llama_version}
            report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "prompt": PROMPT, "short": SHORT}
            report["new"] = LONG - SHORT
            given.out.write_text(
                json.dumps(report | {"machine": facts, "versions": versions, "rounds": rounds}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
