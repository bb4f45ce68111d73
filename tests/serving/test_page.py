"""The page at /, in a real browser."""

import re

import browser
import pytest


@pytest.fixture
def page(server, tmp_path):
    if browser.found() is None:
        pytest.skip(f"no browser here: one of {', '.join(browser.NAMES)} (Debian: apt install chromium)")
    found = browser.Browser(tmp_path / "profile")
    found.look(1100, 800)
    found.open(server.url)
    found.wait("document.querySelector('#model').textContent === 'talk'")
    yield found
    found.close()


LAST = "[...document.querySelectorAll('.assistant')].at(-1)"


def say(page, text, tokens=12, temperature=0):
    page.run(f"tokens.value = {tokens}; temperature.value = {temperature}; document.querySelector('#said').focus()")
    page.type(text)
    page.press("Enter", 13)


def test_a_conversation(page, server):
    say(page, "Once upon a time")
    page.wait(f"document.querySelector('#go').textContent === 'Send' && {LAST}")
    answer = page.run(f"{LAST}.querySelector('div').textContent")
    body = {"messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0, "max_tokens": 12}
    whole = server.post("chat/completions", body).json()["choices"][0]["message"]["content"]
    assert answer == whole.lstrip()
    note = page.run(f"{LAST}.querySelector('small').textContent")
    assert re.match(r"12 tokens · \d+ tokens/s · first after \d\.\d\d s · longest answer reached", note), note

    page.run("system.value = 'Be brief.'")
    say(page, "And then?")  # the second turn knows the first, and what the model is told
    page.wait("document.querySelectorAll('.assistant').length === 2 && document.querySelector('#go').textContent === 'Send'")
    messages = [{"role": "system", "content": "Be brief."}, *body["messages"], {"role": "assistant", "content": whole}]
    wanted = server.post("chat/completions", body | {"messages": [*messages, {"role": "user", "content": "And then?"}]})
    assert page.run(f"{LAST}.querySelector('div').textContent") == wanted.json()["choices"][0]["message"]["content"].lstrip()

    say(page, "A long one", tokens=900, temperature=1)  # Stop, while it streams
    page.wait(f"document.querySelectorAll('.assistant').length === 3 && {LAST}.textContent.length > 60")
    assert page.run("document.querySelector('#go').textContent") == "Stop"
    page.click("#go")
    page.wait(f"{LAST}.querySelector('small').textContent.endsWith('stopped')")
    server.idle()

    page.click("#new")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert all(a.startswith((server.url, "data:")) for a in page.asked())
    assert not page.complaints()


def test_what_a_model_says_is_never_html(page):
    text = "<img src=x onerror=alert(1)> `a < b`\n```py\n<b>1</b>\n```\nend"
    page.run(f"show('assistant', {text!r})")
    assert page.run("document.querySelectorAll('#talk img, #talk b').length") == 0
    assert page.run(f"[...{LAST}.querySelectorAll('code')].map(c => c.textContent)") == ["a < b", "<b>1</b>"]
    assert page.run(f"{LAST}.querySelector('div').textContent.replaceAll('\\n', '|')").startswith(
        "<img src=x onerror=alert(1)> a < b|"
    )


def test_nothing_is_cut_off_on_a_phone(page):
    page.look(360, 640, dark=True, phone=True)
    page.click("#open")
    say(page, "word " * 60)  # Enter is a new line there
    page.click("#go")
    page.wait(f"{LAST} && document.querySelector('#go').textContent === 'Send'")
    assert page.run("document.documentElement.scrollWidth") <= 360
    where = "document.querySelector(s).getBoundingClientRect()"
    boxes = page.run(f"['#said', '#go', '#new', '#open'].map(s => {where}).map(r => [r.left, r.right, r.bottom])")
    assert all(left >= 0 and right <= 360 and bottom <= 640 for left, right, bottom in boxes)


def test_errors_are_said_and_the_key_is_asked_for(start, tmp_path):
    if browser.found() is None:
        pytest.skip(f"no browser here: one of {', '.join(browser.NAMES)} (Debian: apt install chromium)")
    page, server = browser.Browser(tmp_path / "profile"), start("--api-key", "s3cret")
    try:
        page.open(server.url)
        page.wait("document.querySelector('.error') && !document.querySelector('#keylabel').hidden")
        page.type("s3cret")
        say(page, "Once")
        page.wait(f"{LAST} && document.querySelector('#go').textContent === 'Send'")
        assert page.run(f"{LAST}.querySelector('div').textContent.length") > 0
    finally:
        page.close()
