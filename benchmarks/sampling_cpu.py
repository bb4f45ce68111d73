"""Time the draw of a token on this CPU: benchmarks/results/cpu/sampling.json.

    python benchmarks/sampling_cpu.py [--rounds N] [--out FILE]

Logits are normal with a deviation of 3, in fp32, on one thread. A row: {vocabulary, temperature, top_k, top_p, ms of CPU time a
token of one sequence as `lowq generate` draws it, ms a token of one of eight sequences as `lowq serve` does; the least of all
rounds}.
"""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import process_time

import torch

from lowq_cli.engine.sampling import Sampler, Sampling
from lowq_cli.serving.sampler import restrict_rows
from lowq_kernels.decode import reference

OUT = Path(__file__).parent / "results" / "cpu" / "sampling.json"
VOCABULARIES = {"Llama 2": 32_000, "Llama 3": 128_256, "Qwen 3": 151_936, "Gemma 4": 262_144}
SETTINGS = ((0.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 0, 0.95), (0.6, 20, 0.95))  # the last is Qwen 3's generation_config.json
SEQUENCES = 8


def least(run: Callable[[], object], rounds: int) -> float:
    """Milliseconds of CPU time of the fastest of some runs."""
    times = []
    for _ in range(rounds):
        began = process_time()
        run()
        times.append(process_time() - began)
    return round(min(times) * 1e3, 3)


def alone(logits: torch.Tensor, how: Sampling) -> Callable[[], object]:
    """The draw of one sequence's token."""
    sampler = Sampler(reference.choose, 1, logits.shape[-1], logits.device)
    sampler.start(how, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool))
    return lambda: sampler.choose(logits[:1], 1)


def together(logits: torch.Tensor, how: Sampling) -> Callable[[], object]:
    """The draw of a token for each of the sequences."""
    n = len(logits)
    rows, pos, seed = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32), torch.arange(n)
    token, temperature = torch.zeros(n, dtype=torch.int64), torch.full((n,), how.temperature)
    restricted = [torch.full((n, 1), value) for value in (how.top_k, how.top_p, 0.0)]

    def draw() -> None:
        scores = logits
        if how.top_k or how.top_p < 1:
            scores = restrict_rows(scores / how.temperature, *restricted) * how.temperature
        reference.choose_rows(scores, rows, token, pos, seed, temperature)

    return draw


def main() -> None:
    """A row for each vocabulary and setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, V in VOCABULARIES.items():
        logits = torch.randn(SEQUENCES, V, generator=torch.Generator().manual_seed(0)) * 3
        for temperature, top_k, top_p in SETTINGS:
            how = Sampling(temperature, top_k, top_p)
            row = {"vocabulary": name, "V": V, "temperature": temperature, "top_k": top_k, "top_p": top_p}
            row["alone_ms"] = least(alone(logits, how), args.rounds)
            row["of_eight_ms"] = round(least(together(logits, how), args.rounds) / SEQUENCES, 3)
            print(row, flush=True)
            rows.append(row)
    about = {"measured": datetime.now(UTC).date().isoformat(), "cpu": torch.backends.cpu.get_cpu_capability(), "threads": 1}
    about |= {package: version(package) for package in ("torch", "numpy")}
    args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
