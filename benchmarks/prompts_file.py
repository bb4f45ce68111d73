"""Time `lowq generate --prompts` of long prompts with activations of 16 and of 8 bits. <device>/prompts_file.json.

    python benchmarks/prompts_file.py --work /dev/shm/x --base FOLDER --texts FILE [--acts none,fp8] [--prompts 1000]

The model is a small trained one inside a large one's shape (grown.py) in 4 bits. Each prompt is TOKENS tokens from another
place of the texts, and answers have NEW tokens. seconds: of the process. answers_s: of the answers alone, with the recording of
passes and without the loading of the model. The first run of each kind of activations pays for kernels, and is not written.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

from draft_commands import run
from draft_follow import report_of
from draft_http import grown_parser
from grown import grown
from transformers import AutoTokenizer
from vllm_speed import SHAPES

TOKENS, NEW = 900, 4  # the small model's context is 1,024 tokens, and a cut of a text may be written in a few tokens more
WARM = 20  # prompts of the run that is not written


def write_prompts(tokenizer: Any, texts: str, count: int, file: Path) -> None:
    """Write a file of prompts, their first tokens evenly spaced over the texts."""
    ids = tokenizer.encode(texts, add_special_tokens=False)
    step = (len(ids) - TOKENS) // count
    if step < 1:
        raise ValueError("the texts have too few tokens: give more of them")
    cuts = (tokenizer.decode(ids[at : at + TOKENS]) for at in range(0, count * step, step))
    file.write_text("".join(json.dumps({"prompt": cut}) + "\n" for cut in cuts))


def main() -> None:
    """A row for each kind of activations and turn."""
    parser = grown_parser(__doc__)
    parser.add_argument("--acts", type=lambda s: s.split(","), default=["none", "fp8"])
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    (args.work / "home").mkdir(parents=True, exist_ok=True)
    report, folder = report_of(args, "prompts_file.json"), args.work / f"grown-{args.shape}"
    if not folder.exists():
        grown(args.base, folder, SHAPES[args.shape], args.device, 4)
    tokenizer, texts = AutoTokenizer.from_pretrained(args.base), "\n\n".join(file.read_text() for file in args.texts)
    files = {count: args.work / f"prompts-{count}.jsonl" for count in (WARM, args.prompts)}
    for count, file in files.items():
        write_prompts(tokenizer, texts, count, file)
    line = ["generate", str(folder), "--max-new-tokens", str(NEW), "--temperature", "0", "--json"]
    for act in args.acts:
        run(args, *line, "--prompts", str(files[WARM]), "--act", act)
    for turn, act in product(range(args.turns), args.acts):
        found, seconds, _ = run(args, *line, "--prompts", str(files[args.prompts]), "--act", act)
        made, tps = found["new_tokens"], found["tps"]
        report({"turn": turn, "act": act, "prompts": args.prompts, "seconds": seconds, "answers_s": made / tps, "tokens": made})


if __name__ == "__main__":
    main()
