"""Folders with processor and tower, from a picture to the answer, compared with transformers' processors and `generate`."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
import pictured
import sighted

import lowq
from lowq_cli import main
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.prompts import spelled_by
from lowq_cli.engine.vision import sight_of
from lowq_cli.files.source import open_source
from lowq_cli.hf.pictures import Picture, Processor, normalised, written
from lowq_cli.hf.tower import Tower
from lowq_packers.arch.config import read_config
from lowq_packers.arch.parts import Images
from lowq_packers.arch.towers import TOWERS
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError, UsageError

pytestmark = pytest.mark.skipif(
    hasattr(transformers.AutoImageProcessor, "is_dummy"), reason="transformers 5.17 prepares pictures only with torchvision"
)

QUESTION = "What is on these?"
PROCESSORS = {  # whose text we write: module and class
    "qwen2_vl": "qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
    "qwen2_5_vl": "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    "qwen3_vl": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor", "gemma3": "gemma3.processing_gemma3.Gemma3Processor",
    "gemma4": "gemma4.processing_gemma4.Gemma4Processor",
    "llama4": "llama4.processing_llama4.Llama4Processor", "internvl": "internvl.processing_internvl.InternVLProcessor",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> its folder, written once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = sighted.write(name, tmp_path_factory.mktemp(name.replace("/", "-")))
        return made[name]

    return folder


@pytest.fixture
def run():
    """Run lowq with these arguments in this process: its exit code and its output."""

    def lowq_(*args, stdin=""):
        with CliRunner().isolation(stdin) as (out, err, _):
            code = main.main([*map(str, args)])
            return SimpleNamespace(returncode=code, stdout=out.getvalue().decode(), stderr=err.getvalue().decode())

    return lowq_


def theirs(folder, ids, pictures, n):
    """The greedy tokens of transformers' model, the whole text anew for each: its `generate` of Qwen3-VL goes wrong in 5.23."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(str(folder), dtype=torch.float32).eval()
    made = list(ids)
    for _ in range(n):
        made.append(int(pictured.logits_of(model, made, pictures)[-1].argmax()))
    return made[len(ids) :]


@pytest.mark.parametrize("name", sighted.NAMES)
def test_greedy_text_is_that_of_transformers(name, folders):
    """Two pictures and a question through the chat template, one of them a JPEG's bytes; by both loaders."""
    images = [sighted.drawing(1), sighted.encoded(sighted.drawing(2, (30, 50)), "JPEG")]
    model, tokenizer = ready(str(folders(name)), "cpu")
    answer = lowq.stream(model, tokenizer, QUESTION, 12, chat=True, images=images)
    "".join(answer)
    assert answer.decoder.name == "native"
    wanted = theirs(folders(name), answer.prompts[0], answer.shown[0].pictures, 12)
    assert answer.tokens[0] == wanted[: len(answer.tokens[0])]
    assert len(answer.tokens[0]) >= 3
    again = lowq.stream(*lowq.load(str(folders(name)), "cpu"), QUESTION, 12, chat=True, images=images)
    "".join(again)
    assert again.tokens == answer.tokens
    other = lowq.stream(model, tokenizer, QUESTION, 12, chat=True, images=images[::-1])
    "".join(other)
    assert other.prompts != answer.prompts or other.tokens != answer.tokens or name == "gemma3"
    assert sight_of(model).computed == 2  # the same two


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_picture_is_written_as_their_processors_write_it(name, tmp_path):
    """By the method of their class; sizes and tiles at random."""
    tokens = sighted.tokenizer(name)
    own = sighted.TOKENS.get(name, sighted.QWEN)
    module, _, cls = PROCESSORS[name].rpartition(".")
    replace = getattr(importlib.import_module(f"transformers.models.{module}"), cls)
    numbers = list(zip(("image", "boi", "eoi"), map(tokens.token_to_id, own), strict=False))
    model = pictured.model(name, ids={f"{n}_token_{s}": i for n, i in numbers for s in ("id", "index")})
    model.config.save_pretrained(tmp_path)
    images = read_config(json.loads((tmp_path / "config.json").read_text()))[1].images
    for h, w in ((1, 1), (2, 3), (5, 2)):
        if name == "llama4":
            each = 4
            made = {"pixel_values": [torch.zeros(1, 3, 16, 16)], "aspect_ratios": [(h, w)]}
            asked = SimpleNamespace(patch_size=4, downsample_ratio=4)
            asked._prompt_split_image = lambda *a: replace._prompt_split_image(asked, *a)  # noqa: B023
            picture = Picture({}, each * (h * w + (h * w > 1)), tiles=(h, w))
        else:
            made = {"image_grid_thw": torch.tensor([[1, 2 * h, 2 * w]]), "num_crops": [0], "num_soft_tokens_per_image": [h * w]}
            made["num_patches"] = [h * w]
            asked = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token=own[0], boi_token=own[1])
            asked.eoi_token, asked.full_image_sequence = own[2], f"\n\n{own[1]}{own[0] * 4}{own[2]}\n\n"
            asked.start_image_token, asked.end_image_token, asked.image_seq_length = own[1], own[2], images.rows
            picture = Picture({}, images.rows * (h * w if name == "internvl" else 1) or h * w, (h, w))
        assert written(images, picture, tokens.id_to_token) == replace.replace_image_token(asked, made, 0)


def test_rows_of_a_picture_end_in_tokens_of_their_own():
    """The same as Mistral's processor, which needs torchvision."""
    images, spelled = Images(1, "rows"), {1: "[IMG]"}.get
    assert written(images, Picture({}, 6, (2, 3)), spelled) == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"


def test_a_conversation_shows_pictures_as_it_goes_on(folders, run, tmp_path, monkeypatch):
    sighted.drawing(3).save(tmp_path / "a.png")
    sighted.drawing(4).save(tmp_path / "b.webp")
    sighted.drawing(5).save(tmp_path / "c d.png")
    shown = ("/image a.png 'c d.png'", "/image c d.png", "/image c\\ d.png", "/image 'c")
    lines = ("/image a.png", "What?", "And then?", "/image b.webp", "This?", "/image nothing.png", "/save t.json", *shown, "")
    monkeypatch.chdir(tmp_path)
    done = run(
        "chat", folders("qwen3_vl"), "--device", "cpu", "--temperature", "0", "--max-new-tokens", "5", stdin="\n".join(lines)
    )
    assert done.returncode == 0, done.stderr
    assert "there is no picture nothing.png" in done.stderr
    assert "there is no picture 'c" in done.stderr
    assert done.stderr.count("\nc d.png will be sent with your next message") == 3
    messages = json.loads((tmp_path / "t.json").read_text())
    assert [type(m["content"]).__name__ for m in messages] == ["list", "str", "str", "str", "list", "str"]


def test_generate_and_run_take_files_of_pictures(folders, run, tmp_path):
    sighted.drawing(3).save(tmp_path / "a.png")
    folder = folders("qwen2_5_vl")
    how = ("--device", "cpu", "--json", "--max-new-tokens", "6")
    one = run("generate", folder, "--prompt", QUESTION, "--image", tmp_path / "a.png", "--chat", *how)
    assert one.returncode == 0, one.stderr
    two = run("run", folder, QUESTION, tmp_path / "a.png", "--temperature", "0", *how)
    assert two.returncode == 0, two.stderr
    turned = run("run", folder, tmp_path / "a.png", QUESTION, "--temperature", "0", *how)  # the picture before the question
    assert json.loads(turned.stdout)["text"] == json.loads(two.stdout)["text"]
    alone = run("run", folder, tmp_path / "a.png", *how)
    assert alone.returncode == 2
    assert "a.png is a picture; say what you ask about it: lowq run" in alone.stderr
    (tmp_path / "text.JPG").write_text("no pixels")
    for given, line in (
        (["missing.png"], "there is no picture missing.png"),
        ([tmp_path / "my lost.webp"], "there is no picture"),
        ([tmp_path / "a.png", "b.gif"], "there is no picture b.gif"),
        ([tmp_path / "text.JPG"], "text.JPG is not a PNG"),
    ):
        refused = run("run", folder, *given, *how)
        assert (refused.returncode != 0, line in refused.stderr) == (True, True), refused.stderr
    one, two = json.loads(one.stdout), json.loads(two.stdout)
    assert one["prompt_tokens"] == two["prompt_tokens"] > 35
    without = json.loads(run("generate", folder, "--prompt", QUESTION, "--chat", *how).stdout)
    assert without["prompt_tokens"] < one["prompt_tokens"] - 30
    assert 0 < one["pictures_s"] < one["ttft_s"]
    assert "pictures_s" not in without


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        (["nothing.png"], NotFoundError, "there is no picture nothing.png"),
        ([b"%PDF-1.7"], UsageError, "is not a PNG, JPEG, WebP or GIF"),
        (["text", "x.png"], NotFoundError, "there is no picture text"),
    ],
)
def test_a_file_that_is_not_a_picture_is_refused_in_one_line(folders, given, error, why):
    model, tokenizer = ready(str(folders("gemma3")), "cpu")
    with pytest.raises(error, match=why):
        lowq.stream(model, tokenizer, QUESTION, images=given)


def test_a_text_that_holds_the_place_of_a_picture_is_refused(folders):
    model, tokenizer = ready(str(folders("qwen3_vl")), "cpu")
    with pytest.raises(UsageError, match=r"leave <\|image_pad\|> out"):
        lowq.stream(model, tokenizer, "<|image_pad|> what?", chat=True, images=[sighted.drawing(1)])


def test_models_without_a_tower_say_so():
    model, tokenizer = lowq.load("demo", "cpu")
    with pytest.raises(UnsupportedError, match="llama has no picture inputs"):
        lowq.stream(model, tokenizer, QUESTION, images=[sighted.drawing(1)])


def test_an_error_names_the_missing_processor(tmp_path):
    sighted.write("qwen3_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    model, tokenizer = ready(str(tmp_path), "cpu")
    with pytest.raises(NotFoundError, match=r"has no preprocessor_config\.json"):
        lowq.stream(model, tokenizer, QUESTION, images=[sighted.drawing(1)])


def test_crops_that_are_written_otherwise_are_refused_in_one_line(tmp_path):
    sighted.write("gemma3", tmp_path)
    facts = json.loads((tmp_path / "preprocessor_config.json").read_text())
    facts |= {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4}
    facts |= {"pan_and_scan_min_ratio_to_activate": 1.2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    model, tokenizer = ready(str(tmp_path), "cpu")
    with pytest.raises(UnsupportedError, match="has do_pan_and_scan, which lowq does not write"):
        lowq.stream(model, tokenizer, QUESTION, images=[sighted.drawing(1, (90, 30))])


@pytest.mark.parametrize("edges", [(1 << 40, 1 << 41), (-4, 100)])
def test_a_processor_that_would_fill_the_memory_is_refused(tmp_path, edges):
    sighted.write("qwen3_vl", tmp_path)
    facts = json.loads((tmp_path / "preprocessor_config.json").read_text())
    size = dict(zip(("shortest_edge", "longest_edge"), edges, strict=True))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts | {"size": size}))
    model, tokenizer = ready(str(tmp_path), "cpu")
    with pytest.raises(DamagedError, match="the processor"):
        lowq.stream(model, tokenizer, QUESTION, images=[sighted.drawing(1)])


def test_a_tower_that_is_not_whole_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    sighted.write("gemma3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(n for n in tensors if "vision_tower" in n)
    save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, tokenizer = ready(str(tmp_path), "cpu")
    with pytest.raises(DamagedError, match="is incomplete"):
        lowq.stream(model, tokenizer, QUESTION, images=[sighted.drawing(1)])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_quantized_folder_keeps_its_tower_by_default(name, folders, tmp_path):
    """Kept, the features are the model's own; in 8 bits close to them, and the plan has a line for it."""
    features = []
    for vision in ("keep", 8):
        out = tmp_path / f"{vision}"
        report = lowq.quantize(str(folders(name)), out=str(out), bits=4, group=32, vision=vision)
        model, tokenizer = ready(str(out), "cpu")
        answer = lowq.stream(model, tokenizer, QUESTION, 6, chat=True, images=[sighted.drawing(1)])
        "".join(answer)
        features.append(answer.shown[0].features[0].float())
        kinds = {(c.kind, c.schemes) for c in report.plan.classes} if hasattr(report, "plan") else set()
        assert not kinds or any(k == "vision" for k, _ in kinds)
    model, tokenizer = ready(str(folders(name)), "cpu")
    answer = lowq.stream(model, tokenizer, QUESTION, 6, chat=True, images=[sighted.drawing(1)])
    wanted = answer.shown[0].features[0].float()
    assert pictured_off(features[0], wanted) < 0.02  # bfloat16
    assert 1e-3 < pictured_off(features[1], wanted) < 0.1


def pictured_off(found, wanted):
    """Relative difference."""
    return ((found - wanted).norm() / wanted.norm()).item()


def test_pictures_of_several_prompts_and_copies(folders):
    model, tokenizer = ready(str(folders("qwen3_vl")), "cpu")
    a, b = sighted.drawing(1), sighted.drawing(5, (44, 60))
    both = lowq.stream(model, tokenizer, [QUESTION, QUESTION], 5, images=[[a], [b]])
    "".join(both)
    for i, image in enumerate((a, b)):
        one = lowq.stream(model, tokenizer, QUESTION, 5, images=[image])
        "".join(one)
        assert both.tokens[i] == one.tokens[0]
    with pytest.raises(UsageError, match=r"one sequence per prompt \(2 prompts\)"):
        lowq.stream(model, tokenizer, [QUESTION, QUESTION], 5, images=[[a]])


MEANS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


@pytest.mark.parametrize("name", [*sighted.NAMES, "llava/means", "qwen3_vl/means", "gemma3/floats", "gemma3/one"])
def test_pixels_are_those_of_their_processor(name, folders, tmp_path):
    """They are levels in 8 bits; its own numbers where it makes them of others, or rounds them to bf16 (Llama 4)."""
    folder, (family, _, kind) = folders(name.partition("/")[0]), name.partition("/")
    if kind:
        one = {"image_mean": 0.4, "image_std": 0.3}  # for all channels
        changed = {"means": MEANS, "floats": {"do_rescale": False}, "one": one}[kind]
        folder = Path(shutil.copytree(folder, tmp_path / "model"))
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with open_source(folder) as source:
        images = read_config(source.config, len(source.headers))[1].images
    processor, how = Processor(folder, images), {"patch_size": 8} if family == "mistral3" else {}
    for size in ((60, 44), (31, 75), (16, 16), (200, 90)):
        image = sighted.drawing(size[0], size)
        own, ours = processor.own(images=[image], return_tensors="pt", **how), processor(image).inputs
        assert (ours["pixel_values"].dtype == torch.uint8) == (kind != "floats" and name != "llama4")
        torch.testing.assert_close(
            normalised(ours)["pixel_values"].float(), torch.as_tensor(own["pixel_values"]).float(), rtol=0, atol=2e-6
        )


@pytest.mark.parametrize(
    "change",
    [
        {"image_mean": "abc"},
        {"image_mean": [0.5]},
        {"image_std": [1, 2]},
        {"image_std": [1, 1, 10**400]},
        {"rescale_factor": "x"},
    ],
)
def test_numbers_that_no_processor_takes_are_refused_in_one_line(change, folders, tmp_path):
    folder = Path(shutil.copytree(folders("gemma3"), tmp_path / "model"))
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with open_source(folder) as source:
        processor = Processor(folder, read_config(source.config, len(source.headers))[1].images)
    with pytest.raises(UsageError, match=r"the model's processor \(preprocessor_config\.json\) refuses the picture"):
        processor(sighted.drawing(1))


@pytest.mark.parametrize("change", [{"size": {"shortest_edge": -1}}, {"crop_size": {"height": 10**6, "width": 10**6}}], ids=str)
def test_sizes_that_would_take_all_memory_are_refused_with_the_file(change, folders, tmp_path):
    folder = Path(shutil.copytree(folders("llava"), tmp_path / "model"))
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with (
        open_source(folder) as source,
        pytest.raises(DamagedError, match=rf"{re.escape(str(file))}: .*at most 8192 is allowed"),
    ):
        Processor(folder, read_config(source.config, len(source.headers))[1].images)


def test_a_picture_is_the_same_by_path_bytes_and_image(folders):
    model, tokenizer = ready(str(folders("mistral3")), "cpu")
    sight, image = sight_of(model), sighted.drawing(6)
    assert sight.picture(image).name == sight.picture(sighted.encoded(image)).name
    assert sight.picture(image).name != sight.picture(sighted.drawing(7)).name
    assert spelled_by(tokenizer)(sight.images.token) == "[IMG]"
    assert isinstance(image, Image.Image)


@pytest.mark.parametrize(("name", "vision"), [("gemma3", 8), ("qwen3_vl", 8), ("mistral3", "keep"), ("qwen2_5_vl", "keep")])
def test_exports_keep_the_tower_where_their_readers_look_for_it(name, vision, tmp_path):
    """compressed-tensors: transformers loads the whole class and sees the same, also with a quantized tower, which is packed,
    except SigLIP's (Gemma), which transformers cannot load packed; GPTQ holds it unpacked, MLX has no groups for it here."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForImageTextToText

    folder = sighted.write(name, tmp_path / "model", torch.bfloat16)
    with open_source(folder) as source:
        tower = {n for n in source.headers if TOWERS.search(n)}
    lowq.quantize(str(folder), out=str(tmp_path / "lowq"), bits=4, group=32, zero="none", lm_head="keep", vision=vision)
    model, tokenizer = ready(str(tmp_path / "lowq"), "cpu")
    answer = lowq.stream(model, tokenizer, QUESTION, 1, chat=True, images=[sighted.drawing(1)])
    "".join(answer)
    (picture,), ids = answer.shown[0].pictures, answer.prompts[0]
    lowq.export(str(tmp_path / "lowq"), "compressed-tensors", out=str(tmp_path / "ct"))
    with open_source(tmp_path / "ct") as source:
        assert (tower <= set(source.headers)) == (name != "qwen3_vl")
    theirs = AutoModelForImageTextToText.from_pretrained(str(tmp_path / "ct"), dtype=torch.bfloat16).eval()
    wanted = pictured.logits_of(theirs, ids, [picture])[-1]  # the first pass unpacks
    assert pictured_off(decoder_of(model).logits(torch.tensor([ids]), answer.shown)[0, -1].float(), wanted) < 0.1
    rows, _ = Tower(theirs)(picture.inputs)
    assert pictured_off(answer.shown[0].features[0].float(), rows.float()) < 0.02
    again, tokenizer = ready(str(tmp_path / "ct"), "cpu")  # and by lowq
    back = lowq.stream(again, tokenizer, QUESTION, 1, chat=True, images=[sighted.drawing(1)])
    "".join(back)
    assert torch.equal(back.shown[0].features[0], answer.shown[0].features[0])
    for form in ("gptq", "mlx") if vision == "keep" else ("gptq",):
        notes = lowq.export(str(tmp_path / "lowq"), form, out=str(tmp_path / form)).notes
        assert any("written unpacked" in note for note in notes) == (vision == 8)
        with open_source(tmp_path / form) as source:
            assert {n for n in source.headers if TOWERS.search(n)} == tower, form


def test_eval_compares_predictions_behind_pictures(folders, run, tmp_path):
    """With itself: none differ. With 4 bits: some do; without its picture a text is another."""
    shown = tmp_path / "shown"
    shown.mkdir()
    for i, text in enumerate(("A red square and a blue one.", "Nothing but noise, says the tower.")):
        sighted.drawing(i).save(shown / f"{i}.png")
        (shown / f"{i}.txt").write_text(text)
    folder = folders("qwen3_vl")
    how = ("--images", shown, "--device", "cpu", "--json", "--against", folder)
    same = json.loads(run("eval", folder, *how).stdout)
    assert same["kl"] < 1e-9
    assert same["top1_agreement"] == 1
    lowq.quantize(str(folder), out=str(tmp_path / "four"), bits=4, group=32)
    four = json.loads(run("eval", tmp_path / "four", *how).stdout)
    assert four["kl"] > 1e-4
    assert four["predicted"] == same["predicted"] > 10
    refused = run("eval", folder, *how, "--text", "x.txt")
    assert refused.returncode == 2
    assert "leave --text out" in refused.stderr + refused.stdout
    empty = run("eval", folder, "--images", tmp_path, "--device", "cpu")
    assert "no picture with a text file of the same name" in empty.stderr
