"""Pictures over HTTP: OpenAI's client, what is refused, what strangers send, addresses that are not fetched from."""

import base64
import http.server
import io
import json
import os
import random
import signal
import socket
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import browser
import openai
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
import sighted
from mutated import mutants

from lowq_cli.files import picture_file
from lowq_cli.files.picture_file import MOST_PIXELS, decode
from lowq_cli.serving import processes
from lowq_cli.serving.http import pictures
from lowq_packers.errors import LowqError, NotFoundError, UsageError

QUESTION = "What is this?"


ROLES = "{% for m in messages %}{% if m.role == 'system' and m.content is not string %}{{ m.content[-1].text }}{% else %}"
PLAIN = {"url": "data:image/png;base64,"}


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """A model whose chat template leaves out pictures of the system, as some do."""
    folder = sighted.write("qwen3_vl", tmp_path_factory.mktemp("sees"))
    template = (folder / "chat_template.jinja").read_text()
    dropped = template.replace("{% for m in messages %}", ROLES, 1).replace(
        "<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}", 1
    )
    (folder / "chat_template.jinja").write_text(dropped)
    return folder


@pytest.fixture(scope="module")
def seeing(start_for_all, sees):
    return start_for_all(sees, "--name", "sees")


def url(image, kind="PNG"):
    return f"data:image/{kind.lower()};base64," + base64.b64encode(sighted.encoded(image, kind)).decode()


def message(*images, text=QUESTION):
    parts = [{"type": "image_url", "image_url": {"url": i, "detail": "auto"}} for i in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def test_openai_s_client_shows_pictures(seeing, sees):
    """One, several, streamed; the same question without; a conversation; the answer is generate's."""
    import lowq
    from lowq_cli.engine.open_model import ready

    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none")
    a, b = sighted.drawing(1), sighted.drawing(2, (30, 50))
    how = {"model": "sees", "temperature": 0, "max_tokens": 8}
    one = client.chat.completions.create(messages=[message(url(a))], **how)
    two = client.chat.completions.create(messages=[message(url(a), url(b, "JPEG"))], **how)
    none = client.chat.completions.create(messages=[message()], **how)
    assert none.usage.prompt_tokens + 30 < one.usage.prompt_tokens < two.usage.prompt_tokens - 20
    model, tokenizer = ready(str(sees), "cpu")
    for answer, images in ((one, [a]), (two, [a, sighted.encoded(b, "JPEG")])):
        ours = lowq.stream(model, tokenizer, QUESTION, 8, chat=True, images=images)
        assert answer.choices[0].message.content == "".join(ours)
        assert answer.usage.prompt_tokens == len(ours.prompts[0])
    streamed = client.chat.completions.create(messages=[message(url(a))], stream=True, **how)
    assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == one.choices[0].message.content
    turns = [message(url(a)), {"role": "assistant", "content": "A."}, message(url(b), text="And this?")]
    again = client.chat.completions.create(messages=turns, **how)
    assert again.usage.prompt_tokens > one.usage.prompt_tokens + 20
    assert again.usage.prompt_tokens_details.cached_tokens in (0, 64)
    assert "images" in client.models.retrieve("sees").model_dump()["features"]


REFUSED = [
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "serve with --allow-image-urls"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be data:image"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}, "not base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, "not a PNG, JPEG, WebP or GIF"),
    ({"type": "image_url", "image_url": {"link": "x"}}, "unknown field"),
    ({"type": "image_url", "image_url": 7}, "must be an object"),
    ({"type": "image"}, "send a picture as"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "not videos"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "not sound"),
    ({"type": "hologram"}, "takes texts and pictures"),
]


def test_unsupported_parts_are_refused_by_name(seeing):
    for part, why in REFUSED:
        answer = seeing.post("chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2})
        assert answer.status_code == 400, (part, answer.text)
        assert why in answer.json()["error"]["message"], (part, answer.text)
    many = seeing.post("chat/completions", {"messages": [message(*[url(sighted.drawing(1))] * 17)], "max_tokens": 2})
    assert "a request may have 16" in many.json()["error"]["message"]
    typed = message(url(sighted.drawing(1)), text="<|image_pad|>?")
    assert "leave <|image_pad|> out" in seeing.post("chat/completions", {"messages": [typed]}).json()["error"]["message"]
    fine = seeing.post("chat/completions", {"messages": [message(url(sighted.drawing(1)))], "max_tokens": 2})
    assert fine.status_code == 200


def test_a_model_without_a_tower_refuses_pictures(server):
    answer = server.post("chat/completions", {"messages": [message(url(sighted.drawing(1)))], "max_tokens": 2})
    assert answer.status_code == 400
    assert "takes no pictures" in answer.json()["error"]["message"]


def test_a_picture_that_ends_its_process_is_refused_and_the_next_is_read(sees, tmp_path, monkeypatch):
    """As a decoder would that a picture breaks: here the process is killed before it reads. One that cannot start says why."""
    from lowq_packers.arch.config import read_config

    monkeypatch.setattr(processes, "context", get_context("spawn"))  # as users have it: signals are blocked from the start
    images = read_config(json.loads((sees / "config.json").read_text()))[1].images
    reader, whole = pictures.PictureReader(str(sees), images, read_s=120.0), sighted.encoded(sighted.drawing(1))
    (started,) = reader.processes  # before any picture is sent
    for number in processes.OURS:  # of the server's whole group
        os.kill(started.process.pid, number)
    first = reader.preprocess(whole)
    assert reader.processes == [started]
    started.process.kill()
    started.process.join()
    with pytest.raises(LowqError, match="ended the process"):
        reader.preprocess(whole)
    assert reader.preprocess(whole) == first
    (busy,) = reader.processes
    os.kill(busy.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:  # one of the two is read by a process that starts because the other is busy
        both = [threads.submit(reader.preprocess, whole) for _ in range(2)]
        ended, _ = wait(both, return_when=FIRST_COMPLETED)
        assert [one.result() for one in ended] == [first]
        os.kill(busy.process.pid, signal.SIGCONT)
        assert [one.result() for one in both] == [first] * 2
    assert len(reader.processes) == 2
    reader.stop()
    empty = pictures.PictureReader(str(tmp_path), images)
    with pytest.raises(NotFoundError, match="says how pictures are prepared"):
        empty.preprocess(whole)
    empty.stop()


def test_a_process_that_never_becomes_ready_is_given_up(sees):
    from lowq_packers.arch.config import read_config

    images = read_config(json.loads((sees / "config.json").read_text()))[1].images
    reader = pictures.PictureReader(str(sees), images, start_s=0.0)
    with pytest.raises(LowqError, match="is not ready after 0 s; try again later"):
        reader.preprocess(sighted.encoded(sighted.drawing(1)))
    reader.start_s = 120.0
    picture = None
    while picture is None:
        with suppress(LowqError):  # of processes that began under the bound of 0 s
            picture = reader.preprocess(sighted.encoded(sighted.drawing(1)))
    reader.stop()


def test_pictures_of_all_kinds_are_read_right_or_refused():
    """EXIF turns, CMYK, 16 bits, palettes, alpha, one bit; animated ones, bombs, slivers and what is cut off are refused."""
    a = sighted.drawing(3, (40, 30))
    turned = Image.Exif()
    turned[0x0112] = 6  # turn by 90 degrees to see it upright
    seen = decode(sighted.encoded(a, "JPEG", exif=turned, quality=95))
    assert seen.size == (30, 40)
    assert near(seen.rotate(90, expand=True), a, 40)
    assert near(decode(sighted.encoded(a.convert("CMYK"), "JPEG", quality=95)), a, 60)
    grey = Image.new("I;16", (8, 8))
    grey.putdata([i * 1000 for i in range(64)])
    found = decode(sighted.encoded(grey))
    assert [found.getpixel((i % 8, i // 8))[0] for i in (0, 10, 63)] == [0, 10000 // 257, 63000 // 257]
    assert near(decode(sighted.encoded(a.convert("P", palette=Image.Palette.ADAPTIVE))), a, 40)
    clear = Image.new("RGBA", (6, 6), (255, 0, 0, 0))
    assert decode(sighted.encoded(clear)).getpixel((2, 2)) == (255, 255, 255)
    assert decode(sighted.encoded(Image.new("1", (6, 6), 1))).getpixel((1, 1)) == (255, 255, 255)
    for kind in ("PNG", "WEBP", "GIF"):
        assert near(decode(sighted.encoded(a, kind)), a, 60)
        moving = sighted.encoded(a, kind, save_all=True, append_images=[sighted.drawing(4, (40, 30))])
        with pytest.raises(UsageError, match="is animated"):
            decode(moving)
    for size in ((1, 60000), (60000, 1), (400, 2)):
        with pytest.raises(UsageError, match=r"a side may be at most 150 times"):
            decode(sighted.encoded(Image.new("L", size)))
    bomb = io.BytesIO()
    Image.new("1", (20000, 20000)).save(bomb, "PNG")  # 50 kB of file, 1.2 GB of pixels
    with pytest.raises(UsageError, match="decompression bomb"):
        decode(bomb.getvalue())
    with pytest.raises(UsageError, match=r"9000 x 8000 pixels; at most 64 million"):
        decode(sighted.encoded(Image.new("1", (9000, 8000))))
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = sighted.encoded(sighted.drawing(5, (200, 200)), kind)
        with pytest.raises(UsageError, match="cannot be read"):
            decode(data[: len(data) // 2])
    with pytest.raises(UsageError, match="at most 20 MB"):
        decode(b"\x89PNG\r\n\x1a\n" + bytes(21 << 20))
    with pytest.raises(UsageError, match="not a PNG, JPEG, WebP or GIF"):
        decode(sighted.encoded(a, "TIFF"))
    assert picture_file.MOST_PIXELS == MOST_PIXELS == 1 << 26


def near(found, wanted, most):
    """Whether two pictures are alike, at most so different a pixel on the average."""
    from PIL import ImageChops, ImageStat

    return found.size == wanted.size and sum(ImageStat.Stat(ImageChops.difference(found, wanted.convert("RGB"))).mean) < most


def test_hostile_pictures_are_read_or_refused_in_one_line(pytestconfig):
    """A few hundred by default; 10,000 with --hostile-pictures 10000."""
    lines, read = [], 0
    for name, data in mutants(pytestconfig.getoption("hostile_pictures"), seed=7):
        try:
            image = decode(data)
        except UsageError as e:
            lines.append((name, str(e)))
            continue
        assert image.mode == "RGB", name
        assert 0 < image.width * image.height <= MOST_PIXELS, name
        read += 1
    assert not [pair for pair in lines if "\n" in pair[1] or len(pair[1]) > 500]
    assert len(lines) > 20
    assert read > 20


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1", "fc00::1",
     "224.0.0.1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "100.64.0.1", "255.255.255.255"],
)  # fmt: skip
def test_private_addresses_are_not_fetched_from(address):
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(UsageError, match="inside a network"):
        pictures.fetch(f"http://{host}:1/a.png")


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_addresses_are(address):
    assert list(pictures.addresses(address, 80)) == [address]


class Web(http.server.BaseHTTPRequestHandler):
    """A picture, a link to it, one to this machine, one without end, one too large."""

    picture = b""

    def do_GET(self):
        where = {"/hop": "/a.png", "/home": "http://127.0.0.1:1/a.png", "/round": "/round"}.get(self.path)
        if where:
            self.send_response(302)
            self.send_header("Location", where)
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(self.picture if self.path == "/a.png" else b"\x89PNG\r\n\x1a\n" + bytes(21 << 20))

    def log_message(self, *_):
        pass


def test_links_are_fetched_from_the_address_that_was_checked(monkeypatch):
    """A name that leads to a public address when it is asked for, and to this machine when it is asked for again."""
    Web.picture = sighted.encoded(sighted.drawing(1))
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    port, asked, connect = web.server_port, [], socket.create_connection

    def getaddrinfo(host, port, *_, **__):
        asked.append(host)
        address = "93.184.216.34" if host == "pictures.example" else host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    def create_connection(address, **how):
        assert address[0] == "93.184.216.34"  # the checked one: not the name, which could lead elsewhere now
        return connect(("127.0.0.1", address[1]), **how)

    monkeypatch.setattr(pictures.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(pictures.socket, "create_connection", create_connection)
    base = f"http://pictures.example:{port}"
    assert pictures.fetch(f"{base}/a.png") == pictures.fetch(f"{base}/hop") == Web.picture
    for path, why in (
        ("home", "inside a network"),
        ("round", "redirects more than"),
        ("none", "answers 404"),
        ("big", "20 MB"),
    ):
        with pytest.raises(UsageError, match=why):
            pictures.fetch(f"{base}/{path}")
    assert set(asked) == {"pictures.example", "127.0.0.1"}
    web.shutdown()


def test_mutants_are_of_all_kinds():
    names = {name.split()[0] for name, _ in mutants(200, seed=1)}
    assert names == {"PNG", "JPEG", "WEBP", "GIF"}
    assert len({data for _, data in mutants(200, seed=1)}) > 150
    assert random.Random(1).random() != random.Random(2).random()


def test_the_other_dialects_show_pictures_too(seeing):
    """Anthropic's, ollama's, OpenAI's responses: the answer and the tokens are those of chat completions."""
    import httpx

    data = base64.b64encode(sighted.encoded(sighted.drawing(1))).decode()
    wanted = seeing.post(
        "chat/completions", {"messages": [message(url(sighted.drawing(1)))], "max_tokens": 6, "temperature": 0}
    )
    answer, usage = wanted.json()["choices"][0]["message"]["content"], wanted.json()["usage"]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"model": "sees", "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    anthropic = seeing.post("messages", body).json()
    assert "".join(part.get("text", "") for part in anthropic["content"]) == answer
    counted = seeing.post("messages/count_tokens", {k: body[k] for k in ("model", "messages")}).json()
    assert counted["input_tokens"] == usage["prompt_tokens"]
    said = {"role": "user", "content": QUESTION, "images": [data]}
    options = {"temperature": 0, "num_predict": 6}
    ollama = httpx.post(
        f"{seeing.url}/api/chat", json={"model": "sees", "messages": [said], "stream": False, "options": options}
    )
    assert ollama.json()["message"]["content"] == answer
    parts = [{"type": "input_image", "image_url": url(sighted.drawing(1))}, {"type": "input_text", "text": QUESTION}]
    how = {"model": "sees", "max_output_tokens": 6, "temperature": 0, "store": False}
    responses = seeing.post("responses", {**how, "input": [{"role": "user", "content": parts}]}).json()
    assert responses["output"][-1]["content"][0]["text"] == answer


def test_langchain_shows_pictures(seeing):
    chat = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.messages import HumanMessage

    data = base64.b64encode(sighted.encoded(sighted.drawing(1))).decode()
    wanted = seeing.post(
        "chat/completions", {"messages": [message(*[url(sighted.drawing(1))] * 2)], "max_tokens": 6, "temperature": 0}
    ).json()["choices"][0]["message"]["content"]
    ways = (
        {"type": "image_url", "image_url": {"url": url(sighted.drawing(1))}},
        {"type": "image", "base64": data, "mime_type": "image/png"},
    )
    model = chat.ChatOpenAI(base_url=f"{seeing.url}/v1", api_key="none", model="sees", temperature=0, max_tokens=6)
    for part in ways:
        asked = [HumanMessage(content=[part, part, {"type": "text", "text": QUESTION}])]
        assert model.invoke(asked).content == wanted
        assert "".join(str(c.content) for c in model.stream(asked)) == wanted
    video = HumanMessage(content=[{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}])
    with pytest.raises(openai.BadRequestError, match="not videos"):
        model.invoke([video])


ELSEWHERE = [
    ("messages", {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": "AAAA"}}, "video"),
    ("messages", {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}, "document"),
    ("messages", {"type": "image", "source": {"type": "base64", "media_type": "video/mp4", "data": "AAAA"}}, "video/mp4"),
    ("responses", {"type": "input_video", "video_url": "data:video/mp4;base64,AAAA"}, "input_video"),
    ("responses", {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
    ("responses", {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"}, "input_file"),
]


@pytest.mark.parametrize(("path", "part", "name"), ELSEWHERE)
def test_unsupported_parts_are_named_in_the_other_dialects(seeing, path, part, name):
    said = [{"role": "user", "content": [part]}]
    body = {"input": said} if path == "responses" else {"messages": said, "max_tokens": 2}
    answer = seeing.post(path, {"model": "sees", **body})
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("field", ["videos", "audio"])
def test_ollama_s_messages_take_pictures_alone(seeing, field):
    import httpx

    said = {"role": "user", "content": "x", field: ["AAAA"]}
    answer = httpx.post(f"{seeing.url}/api/chat", json={"model": "sees", "messages": [said], "stream": False})
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"], answer.text


@pytest.fixture
def page(seeing, tmp_path):
    if browser.found() is None:
        pytest.skip(f"no browser here: one of {', '.join(browser.NAMES)} (Debian: apt install chromium)")
    found = browser.Browser(tmp_path / "profile")
    found.look(900, 900)
    found.open(seeing.url)
    found.wait("document.querySelector('#model').value === 'sees'")
    yield found
    found.close()


HOW = "{ %s: data, bubbles: true, cancelable: true }"
PASTE = f"document.querySelector('#said').dispatchEvent(new ClipboardEvent('paste', {HOW % 'clipboardData'}))"
DROP = f"document.body.dispatchEvent(new DragEvent('drop', {HOW % 'dataTransfer'}))"
CHOOSE = "{ const f = document.querySelector('#files'); f.files = data.files; f.dispatchEvent(new Event('change')); }"


def test_the_page_takes_pictures_by_button_paste_and_drop(page, seeing, tmp_path):
    """They are shown, sent, kept; the answer is that of the same request."""
    assert page.run("document.querySelector('#add').hidden") is False
    page.run("(window.made = document.createElement('canvas')).width = 60")
    for n, how in enumerate((PASTE, DROP, CHOOSE), 1):
        file = "data.items.add(new File([blob], 'a.png', { type: 'image/png' }))"
        page.run(f"made.height = {24 + 20 * n}; made.getContext('2d').fillRect(9, 9, 30, 9)")  # each of another height
        page.run(f"made.toBlob(blob => {{ const data = new DataTransfer(); {file}; {how} }})")
        page.wait(f"document.querySelectorAll('#pictures img').length === {n}")
    page.run("document.querySelectorAll('#pictures button')[2].click()")
    page.wait("document.querySelectorAll('#pictures img').length === 2")
    page.run("tokens.value = 6; temperature.value = 0; document.querySelector('#said').focus()")
    page.type(QUESTION)
    page.press("Enter", 13)
    page.wait("document.querySelector('#go').textContent === 'Send' && document.querySelector('.assistant small').textContent")
    assert page.run("document.querySelectorAll('.user .seen img').length") == 2
    assert page.run("[...document.querySelectorAll('.seen img')].every(i => i.complete && i.naturalWidth === 60)")
    shapes = page.run("[...document.querySelectorAll('.seen img')].map(i => [i.width, i.height, i.naturalHeight])")
    assert shapes == [[60, 44, 44], [60, 64, 64]]  # beside each other, none is stretched
    assert page.run("document.querySelectorAll('#pictures img').length") == 0
    urls = page.run("now.turns[0].images")
    body = {"messages": [message(*urls)], "temperature": 0, "max_tokens": 6}
    whole = seeing.post("chat/completions", body).json()["choices"][0]["message"]["content"]
    assert page.run("document.querySelector('.assistant div').textContent").strip() == whole.strip()
    assert not page.complaints()


def test_pictures_that_do_not_fit_their_text_are_refused_in_one_line(seeing):
    """By OpenAI's client, streamed too; what comes after is answered as before."""
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)
    a = url(sighted.drawing(1))
    how = {"model": "sees", "temperature": 0, "max_tokens": 6}
    fine = {"messages": [message(a)], **how}
    before = client.chat.completions.create(**fine).choices[0].message.content
    of_system = {**message(a, text="Look."), "role": "system"}
    typed = {"role": "user", "content": "<|image_pad|>"}
    wrong = [
        ([of_system, message()], "the chat template writes 0 of the 1 pictures"),
        ([of_system, message(a)], "the chat template writes 1 of the 2 pictures"),
        ([of_system, typed], r"leave <\|image_pad\|> out"),  # as many places as pictures, and yet another place
        ([message(a), typed], r"leave <\|image_pad\|> out"),
        ([message(*[a] * 8)], "maximum context length is 256"),
        ([message(a, text="word " * 240)], "maximum context length is 256"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": PLAIN}]}], "not a PNG, JPEG, WebP or GIF"),
    ]
    for messages, why in wrong:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=why) as refused:
                client.chat.completions.create(messages=messages, stream=stream, **how)
            assert "\n" not in refused.value.body["message"]
    alone = client.chat.completions.create(messages=[typed], **how)  # without a picture it is a token as others
    assert alone.usage.completion_tokens
    parts = message(a)["content"]
    for turns in ([{"role": "user", "content": parts[:1]}], [message(a), {**message(a), "role": "assistant"}, message()]):
        assert client.chat.completions.create(messages=turns, **how).usage.prompt_tokens > 36
    assert client.chat.completions.create(**fine).choices[0].message.content == before


def test_pictures_alike_in_bytes_and_prefixes_that_end_in_a_picture(seeing, sees):
    """Plain pictures of two shapes whose pixels are the same bytes; a text whose blocks end in the middle of pictures."""
    import lowq
    from lowq_cli.engine.open_model import ready

    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none")
    wide, high = (Image.new("RGB", size, (90, 140, 60)) for size in ((64, 32), (32, 64)))
    model, tokenizer = ready(str(sees), "cpu")
    a, b = sighted.drawing(11), sighted.drawing(12)  # which no other test asks this server about
    how = {"model": "sees", "temperature": 0, "max_tokens": 6}
    for images, text, cached in (
        ((wide,), QUESTION, 0), ((high,), QUESTION, 0), ((high, wide), QUESTION, 0), ((wide, high), QUESTION, 0),
        ((a, a, a), QUESTION, 0), ((a, a, a), QUESTION, 128), ((a, a, b), QUESTION, 64), ((a, b, a), QUESTION, 0),
    ):  # fmt: skip
        answer = client.chat.completions.create(messages=[message(*map(url, images), text=text)], **how)
        ours = lowq.stream(model, tokenizer, text, 6, chat=True, images=list(images))
        assert answer.choices[0].message.content == "".join(ours)
        assert answer.usage.prompt_tokens_details.cached_tokens == cached, (len(images), answer.usage)
