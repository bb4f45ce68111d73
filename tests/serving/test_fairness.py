"""Who comes next where more is asked for than can be computed: short ones soon, equals in order, everybody in the end."""

import queue
from types import SimpleNamespace

import pytest
from asking import Client, build, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_cli.serving.fairness import Turns
from lowq_cli.serving.request import Draw, Request
from lowq_cli.serving.sequential import SequentialEngine


@pytest.fixture(scope="module")
def model():
    return build("llama")


def ask(client, prompt, tokens, who=""):
    return client.engine.submit(Request(tuple(prompt), tokens, frozenset(), Draw(), client=who))


def followed(client, *numbers):
    """Their tokens, and how many tokens of all requests came before the last of each."""
    ends = {}
    while len(ends) < len(numbers):
        client.hear()
        for n in numbers:
            if n not in ends and n in client.heard and client.heard[n][-1].finish_reason:
                ends[n] = sum(len(events) for events in client.heard.values())
    return client.tokens(*numbers), ends


@pytest.mark.half_of("others", "cache_tokens")
@pytest.mark.parametrize("others", ["", "another's"], ids=["one address", "two addresses"])
@pytest.mark.parametrize("cache_tokens", [None, 1024], ids=["room", "no room"])
def test_a_few_tokens_do_not_wait_for_thousands(model, others, cache_tokens):
    """Twenty long requests hold four rows; one of four tokens ends among the first, and their texts are what they are alone."""
    client = Client(model, running=4, cache_tokens=cache_tokens)
    try:
        long, short = prompts(*range(20, 40)), prompts(17, seed=9)[0]
        alone = [client.tokens(ask(client, p, 200))[0] for p in (*long[:2], short)]
        before = sum(len(events) for events in client.heard.values())
        numbers = [ask(client, p, 200, "hog") for p in long]
        client.hear(lambda heard: True)
        while client.engine.stats().running < 4:
            client.hear()
        few = ask(client, short, 4, others or "hog")
        result, ends = followed(client, few, *numbers)
        assert ends[few] - before < 600  # of 4,000
        assert result[0] == alone[2][:4]
        assert [result[1], result[2]] == alone[:2]
        order = sorted(numbers, key=ends.get)
        assert set(order[:3]) <= set(numbers[:6])  # equals keep their order, but for who gave way
    finally:
        client.engine.stop(0)


class OneByOne(Client):
    """The client of the engine that answers one request after the other."""

    def __init__(self, model):
        self.engine, self.events, self.heard = SequentialEngine(model, waiting=50), queue.Queue(), {}
        self.engine.start(lambda batch: [self.events.put(e) for e in batch])


def test_one_at_a_time_too(model):
    client = OneByOne(model)
    try:
        numbers = [ask(client, p, 60) for p in prompts(*range(10, 20))]
        few = ask(client, prompts(5)[0], 2)
        _, ends = followed(client, few, *numbers)
        assert sorted([few, *numbers], key=ends.get).index(few) <= 2
        assert sorted(numbers, key=ends.get) == numbers
    finally:
        client.engine.stop(0)


ARRIVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 150), st.sampled_from("abc")), min_size=2, max_size=20)


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, rows=st.integers(1, 4))
def test_every_request_is_served_within_a_proportional_wait(arrivals, rows):
    """Rows that make a token a step each. Under a stream of short ones that never ends, a long one has its turn."""
    now, number, waiting, running, ended = 0, 0, [], [], {}
    coming = sorted(arrivals)
    endless = iter(range(10**6))
    longest = max(asked for _, asked, _ in arrivals)
    while len([q for q in ended if q < len(arrivals)]) < len(arrivals):
        assert now < 40 * (sum(a for _, a, _ in arrivals) + longest), "somebody starves"
        while coming and coming[0][0] <= now:
            _, asked, who = coming.pop(0)
            waiting.append(queued(number, asked, who, now))
            number += 1
        if now % 3 == 0:
            waiting.append(queued(len(arrivals) + next(endless), 2, "z", now))
        while waiting and len(running) < rows:
            turn = Turns([*waiting, *running], now).next(waiting)
            waiting.remove(turn)
            turn.waited += now - turn.since
            running.append(turn)
        if waiting:
            turns = Turns([*waiting, *running], now)
            out = turns.gives_way(turns.next(waiting), [(q, q.left) for q in running])
            if out is not None:
                running.remove(out)
                out.since = now
                waiting.append(out)
        for q in list(running):
            q.left -= 1
            if not q.left:
                running.remove(q)
                ended[q.number] = now
        now += 1


def queued(number, asked, who, now):
    request = Request((1,), asked, client=who)
    return SimpleNamespace(number=number, request=request, left=asked, since=now, waited=0, first=False)
