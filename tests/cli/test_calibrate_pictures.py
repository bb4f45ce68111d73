"""Calibration on pictures with texts: the layers see what the model sees, and what they are quantized by is another."""

import random
import sys
from pathlib import Path

import pytest
import torch

from lowq_cli.calibrate import texts
from lowq_cli.calibrate.pictures import Pictured
from lowq_cli.evaluate.pictures import measure_pictures
from lowq_cli.files.source import DEMO, open_source
from lowq_cli.hf.layers import DecoderLayers, run
from lowq_cli.hf.tokenizer import load_tokenizer
from lowq_cli.run.pipeline import quantize
from lowq_packers.errors import UnsupportedError, UsageError

sys.path.append(str(Path(__file__).parents[1] / "families"))
import sighted

FAMILIES = ("mistral3", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_5", "llava", "internvl")
WORDS = ("once upon a time there was a red box", "two of them", "a line from the left to the right", "nothing much", "blue")


def drawn(folder, seeds):
    folder.mkdir()
    for seed in seeds:
        r = random.Random(seed)
        sighted.drawing(seed, (r.randrange(30, 90), r.randrange(30, 90))).save(folder / f"{seed:03}.png")
        (folder / f"{seed:03}.txt").write_text(f"{r.choice(WORDS)} and {r.choice(WORDS)}")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of pictures to calibrate on, and another one to measure on."""
    at = tmp_path_factory.mktemp("drawn")
    calib = drawn(at / "calib", range(12))
    (calib / "others.txt").write_text((DEMO / "sample.txt").read_text()[:40000])
    return calib, drawn(at / "judge", range(100, 110))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_one_by_one_see_pictures_as_the_whole_model_does(family, folders, tmp_path):
    from transformers import AutoModelForImageTextToText

    folder = sighted.write(family, tmp_path / "m")
    with open_source(folder) as source:
        blocks, text = DecoderLayers(source, torch.device("cpu")), texts.Text.read(str(folders[0]))
        found = Pictured(source, blocks.base, load_tokenizer(source), text, 1024, 96)
        blocks.pictures, ids = found, found.before(found.ids.clone().roll(1, 1).clamp(min=0))[:4]
        ids = torch.cat([found.ids[:4], ids])
        hidden, others = blocks.start(ids, 8)
        for number in range(len(blocks)):
            with torch.no_grad(), blocks.layer(number) as module:
                hidden = [run(module, h, others[number]) for h in hidden]
        with torch.no_grad(), blocks.tail() as logits:
            ours = logits(ids, hidden[0])
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    assert ids.shape == (8, 96)
    assert (ids < 0).sum(1).unique().numel() == 1
    with torch.no_grad():
        wanted = theirs(**found(ids)).logits
        swapped = theirs(**found(torch.where(ids < 0, ids.roll(1, 0), ids))).logits
    assert (ours - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (ours - swapped).abs().max() > 1e-2 * wanted.abs().max()


def test_what_is_measured_is_another_than_a_texts(folders, tmp_path):
    """Moments of the first layer's inputs: those of texts alone are not those of windows with pictures."""
    from lowq_cli.calibrate.layer_walk import Layer

    folder, found = sighted.write("mistral3", tmp_path / "m"), []
    with open_source(folder) as source:
        for seeing in (True, True, False):
            blocks, text = DecoderLayers(source, torch.device("cpu")), texts.Text.read(str(folders[0]))
            tokenizer = load_tokenizer(source)
            pictured = Pictured(source, blocks.base, tokenizer, text, 1024, 96)
            blocks.pictures = pictured if seeing else None
            ids = pictured.ids[:8] if seeing else texts.choose_windows(texts.tokenize(tokenizer, text.words), 768, 96)
            hidden, others = blocks.start(ids, 8)
            with torch.no_grad(), blocks.layer(0) as module:
                layer = Layer(module, others[0], blocks.linears(0))
                found.append(next(layer.stages(hidden, [h.clone() for h in hidden])).moments.second)
    a, again, b = found
    assert torch.equal(a, again)
    assert (a - b).norm() > 0.1 * b.norm()


def test_predictions_behind_pictures_are_nearer(folders, tmp_path):
    calib, judge = folders
    dense = sighted.write("mistral3", tmp_path / "dense")
    divergence = {}
    for name, text in (("pictures", str(calib)), ("text", str(calib / "others.txt"))):
        out = tmp_path / name
        quantize(dense, out=out, bits=3, group=32, method="gptq", calib=text, calib_tokens=4096, dtype="float32")
        divergence[name] = measure_pictures(out, judge, dense, "cpu").kl
    assert divergence["pictures"] < 0.9 * divergence["text"]


@pytest.mark.parametrize("method", ["yaqa", "distill"])  # distill begins as learn does
def test_each_method_that_reads_a_text_reads_pictures(method, folders, tmp_path):
    dense, divergence = sighted.write("mistral3", tmp_path / "dense"), []
    for name in ("", "others.txt"):
        out = tmp_path / f"m{len(divergence)}"
        how = {"bits": 3, "group": 32, "method": method, "calib_tokens": 4096, "dtype": "float32"}
        quantize(dense, out=out, calib=str(folders[0] / name), **how)
        divergence.append(measure_pictures(out, folders[1], dense, "cpu").kl)
    assert divergence[0] < 0.9 * divergence[1]


def test_models_that_cannot_be_calibrated_by_pictures_say_so(demo4, folders, tmp_path):
    deep = sighted.write("qwen3_vl", tmp_path / "deep")
    with pytest.raises(UnsupportedError, match="adds features of pictures behind its first layers"):
        quantize(deep, out=tmp_path / "a", bits=4, group=32, method="gptq", calib=str(folders[0]))
    with pytest.raises(UnsupportedError, match="has no picture inputs to calibrate on"):
        quantize("demo", out=tmp_path / "b", bits=4, group=64, method="gptq", calib=str(folders[0]))


def test_the_run_is_named_by_the_pictures(folders, tmp_path):
    import shutil

    shutil.copytree(folders[0], tmp_path / "c")
    before = texts.Text.read(str(tmp_path / "c")).digest
    assert before == texts.Text.read(str(folders[0])).digest
    shutil.copyfile(tmp_path / "c" / "001.png", tmp_path / "c" / "000.png")
    assert texts.Text.read(str(tmp_path / "c")).digest != before
    (tmp_path / "c" / "others.txt").unlink()
    (tmp_path / "c" / "more.txt").write_text("other words")
    assert texts.Text.read(str(tmp_path / "c")).words == "other words"
    (tmp_path / "c" / "more.txt").write_text(" ")
    with pytest.raises(UsageError, match="is empty"):
        texts.Text.read(str(tmp_path / "c"))
