"""Measure right answers about drawn pictures by the width of the weights: pictures.json of the results.

    python benchmarks/pictures_right.py FOLDER [--pictures 200] [--device cpu] [--out FILE]

FOLDER is what `pictures_train.py` wrote. It is quantized at each width as `lowq quantize` does by itself, the tower kept or
quantized too, and asked about pictures that it was not trained on, through processor, tower and decoder: one question
each about the name and the colour, and of two pictures at once. "swapped" is asked about one picture and shown another.
"""

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn import Drawn, draw
from PIL import Image

import lowq
from lowq_cli.engine.open_model import ready

WIDTHS = ((16, "keep"), (8, "keep"), (4, "keep"), (4, 8), (4, 4), (3, "keep"), (2, "keep"))  # of the text, of the tower
SEED = 1 << 40  # of no batch that was trained on


def right(folder: str, device: str, pictures: list[Drawn], swapped: bool = False) -> dict[str, float]:
    """Shares of right answers: of names, of colours, of both of two pictures."""
    model, tokenizer = ready(folder, device, lambda line: None)
    images = [Image.fromarray(p.pixels) for p in pictures]
    given = images[1:] + images[:1] if swapped else images

    def ask(question: str, answer: str, shown: list[Any]) -> bool:
        said = lowq.stream(model, tokenizer, question, 12, images=shown, draft="none")
        return "".join(said).strip() == answer

    n, found = len(pictures), dict[str, float]()
    for what, of_colour in (("names", False), ("colours", True)):
        asked = [p.question(of_colour) for p in pictures]
        found[what] = sum(ask(*q, [image]) for q, image in zip(asked, given, strict=True)) / n
    pairs = list(zip(pictures[::2], pictures[1::2], given[::2], given[1::2], strict=False))
    wanted = [f"{a.colour} {a.name} and {b.colour} {b.name}" for a, b, _, _ in pairs]
    found["pairs"] = sum(ask("What are these?", w, [*p[2:]]) for w, p in zip(wanted, pairs, strict=True)) / len(pairs)
    return {k: round(v, 4) for k, v in found.items()}


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pictures.json")
    args = parser.parse_args()
    r = np.random.default_rng(SEED)
    pictures, rows = [draw(r) for _ in range(args.pictures)], list[dict[str, Any]]()
    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    facts = json.loads((args.folder / "trained.json").read_text())  # what the model is

    def say(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        head = {
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "device": name,
            "pictures": args.pictures,
            "model": facts,
        }
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        for bits, vision in WIDTHS:
            folder, size = args.folder, sum(f.stat().st_size for f in args.folder.glob("*.safetensors"))
            if bits < 16:
                folder = Path(scratch) / f"{bits}-{vision}"
                lowq.quantize(str(args.folder), out=str(folder), bits=bits, vision=vision)
                size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
            say(bits=bits, vision=16 if vision == "keep" else vision, bytes=size, **right(str(folder), args.device, pictures))
        say(bits=16, vision=16, swapped=True, **right(str(args.folder), args.device, pictures, swapped=True))


if __name__ == "__main__":
    main()
