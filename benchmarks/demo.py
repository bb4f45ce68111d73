"""`make demo`: quantize, tune and run the bundled model with the commands that a user would type, then print one table.

Usage: python benchmarks/demo.py [--bits N] [--out DIR]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lowq_cli import console

LOWQ = Path(sys.executable).with_name("lowq")
PROMPT = "Once upon a time, in a small house at the edge of the forest,"


def lowq(*args: str) -> dict:
    """Run one lowq command, show it and its progress, return its --json object."""
    console.say(f"\n$ lowq {' '.join(f'{a!r}' if ' ' in a else a for a in args)}")
    done = subprocess.run([LOWQ, *args, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def main() -> None:
    """Quantize, tune, evaluate, generate; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", default="4")
    parser.add_argument("--out", type=Path, default=None, help="keep the checkpoint here (default: a temporary folder)")
    args = parser.parse_args()
    start = time.monotonic()
    out = args.out or Path(tempfile.mkdtemp(prefix="lowq-demo-")) / "story-lowq"
    try:
        made = lowq("quantize", "demo", "--bits", args.bits, "--out", str(out), "--fresh")
        lowq("tune", str(out), "--batch", "1,4", "--budget", "30")
        scored = lowq("eval", str(out), "--against", "demo")
        generation = ("--prompt", PROMPT, "--max-new-tokens", "96", "--temperature", "0.7", "--seed", "1")
        before = lowq("generate", "demo", *generation)
        after = lowq("generate", str(out), *generation)
    finally:
        if args.out is None:
            shutil.rmtree(out.parent, ignore_errors=True)
    source_bpw = 8 * made["source_bytes"] / made["parameters"]
    rows = [
        ("size on disk", console.size(made["source_bytes"]), console.size(made["bytes"])),
        ("bits per weight, whole model", f"{source_bpw:.2f}", f"{made['bpw']:.2f}"),
        ("perplexity, held-out text", f"{scored['base_ppl']:.2f}", f"{scored['ppl']:.2f}"),
        ("decoded tokens/s", f"{before['decode_tps']:.0f}", f"{after['decode_tps']:.0f}"),
    ]
    console.out("")
    console.table(
        f"lowq on the bundled 6.8M-parameter model, {args.bits} bits", ("", ">before", ">after"), rows, on_stdout=True
    )
    console.out("This model is small enough for the processor's cache; larger ones also gain speed (docs/results.md).\n")
    console.out(f"{PROMPT}{after['text']}\n")
    console.out(
        f"{console.duration(time.monotonic() - start)} in all. Next: lowq quantize <your model>; lowq tune; lowq generate"
    )


if __name__ == "__main__":
    main()
