"""The page at /, in a real browser."""

import re

import browser
import pytest


@pytest.fixture
def page(server, tmp_path):
    if browser.found() is None:
        pytest.skip(f"no browser here: one of {', '.join(browser.NAMES)} (Debian: apt install chromium)")
    result = browser.Browser(tmp_path / "profile")
    result.look(1100, 800)
    result.open(server.url)
    result.wait("document.querySelector('#model').textContent === 'talk'")
    yield result
    result.close()


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
    say(page, "And then?")  # the second turn includes the first, and the system message
    page.wait("document.querySelectorAll('.assistant').length === 2 && document.querySelector('#go').textContent === 'Send'")
    messages = [{"role": "system", "content": "Be brief."}, *body["messages"], {"role": "assistant", "content": whole}]
    expected = server.post("chat/completions", body | {"messages": [*messages, {"role": "user", "content": "And then?"}]})
    assert page.run(f"{LAST}.querySelector('div').textContent") == expected.json()["choices"][0]["message"]["content"].lstrip()

    say(page, "A long one", tokens=900)  # Stop, while it streams: at temperature 0 it repeats itself
    page.wait(f"document.querySelectorAll('.assistant').length === 3 && {LAST}.textContent.length > 60")
    assert page.run("document.querySelector('#go').textContent") == "Stop"
    page.click("#go")
    page.wait(f"{LAST}.querySelector('small').textContent.endsWith('stopped')")
    server.idle()

    page.click("#new")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.run("JSON.parse(localStorage['lowq.talks']).map(t => t.turns.length)") == [6]  # the one that was stopped too
    assert all(a.startswith((server.url, "data:")) for a in page.asked())
    assert not page.complaints()


def test_a_models_text_is_never_rendered_as_html(page):
    text = "<img src=x onerror=alert(1)> `a < b`\n```py\n<b>1</b>\n```\nend"
    page.run(f"put('assistant', {{content: {text!r}, thoughts: {text!r}}})")
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


def test_errors_are_shown_and_the_key_is_requested(start, tmp_path):
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


def test_conversations_are_kept_edited_and_answered_again(page, server):
    say(page, "Once upon a time")
    page.wait(f"document.querySelector('#go').textContent === 'Send' && {LAST}")
    first = page.run(f"{LAST}.querySelector('div').textContent")
    page.open(server.url)  # loaded again: an empty page, and the conversation in the list
    page.wait("document.querySelector('#model').value === 'talk'")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    page.run("tokens.value = 12; temperature.value = 0")
    page.click("#menu")
    page.wait("getComputedStyle(document.querySelector('#side')).visibility === 'visible'")
    assert page.run("[...document.querySelectorAll('#talks li')].map(r => r.firstChild.textContent)") == ["Once upon a time"]
    page.run("document.querySelector('#talks button').click()")
    assert page.run(f"{LAST}.querySelector('div').textContent") == first
    page.run("[...document.querySelectorAll('.turn nav button')].find(b => b.textContent === 'Regenerate').click()")
    page.wait(f"document.querySelector('#go').textContent === 'Send' && {LAST}")
    assert page.run(f"{LAST}.querySelector('div').textContent") == first  # at temperature 0
    assert page.run("document.querySelectorAll('.turn').length") == 2

    page.run("[...document.querySelectorAll('.turn nav button')].find(b => b.textContent === 'Edit').click()")
    page.run("Object.assign(document.querySelector('.user textarea'), {value: 'The king'})")
    page.run("[...document.querySelectorAll('.user nav button')].find(b => b.textContent === 'Send').click()")
    page.wait(f"document.querySelector('#go').textContent === 'Send' && {LAST}")
    body = {"messages": [{"role": "user", "content": "The king"}], "temperature": 0, "max_tokens": 12}
    expected = server.post("chat/completions", body).json()["choices"][0]["message"]["content"]
    assert page.run(f"{LAST}.querySelector('div').textContent") == expected.lstrip()
    assert page.run("JSON.parse(localStorage['lowq.talks']).map(t => [t.title, t.turns.length])") == [["The king", 2]]
    page.run("document.querySelector('#talks li button:last-child').click()")
    assert page.run("[localStorage['lowq.talks'], document.querySelectorAll('.turn').length]") == ["[]", 0]
    assert not page.complaints()


def test_a_full_context_is_told_from_a_limit_and_settings_are_sent(page, server):
    say(page, "Once", tokens='""', temperature=1)
    page.wait(f"document.querySelector('#go').textContent === 'Send' && {LAST}")
    note = page.run(f"{LAST}.querySelector('small').textContent")
    assert note.endswith("the context is full: start a new conversation") or "longest" not in note, note
    page.click("#new")
    page.run("top_k.value = 3; seed.value = 5; min_p.value = 0.1; top_p.value = 0.9; repetition_penalty.value = 1.1")
    say(page, "Once", tokens=8, temperature=1)
    page.wait(f"document.querySelector('#go').textContent === 'Send' && {LAST}")
    body = {"messages": [{"role": "user", "content": "Once"}], "temperature": 1, "max_tokens": 8, "top_k": 3, "seed": 5}
    body |= {"min_p": 0.1, "top_p": 0.9, "repetition_penalty": 1.1}
    expected = server.post("chat/completions", body).json()["choices"][0]["message"]["content"]
    assert page.run(f"{LAST}.querySelector('div').textContent") == expected.lstrip()
    assert page.run(f"{LAST}.querySelector('small').textContent").endswith("longest answer reached")
