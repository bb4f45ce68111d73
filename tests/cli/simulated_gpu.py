"""A GPU by its times alone: the loop of `generate` runs on a clock that only launches, waits and slices of work advance."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from lowq_cli.engine.drafts import drafting
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stream import Generation

LAUNCH_S, TEXT_S = 30e-6, 60e-6  # of the host: to launch a step; to turn a step's tokens into text and look for drafts


class SimulatedGPU:
    """A decoder that says `answer`. step_s(rows): seconds of the device. record_s: of the host, to record a step in slices;
    fails: whether that does not work. at_once_s: of the host, to record one while plain steps wait."""

    name, ahead, graphs, device, reason = "simulated", True, True, torch.device("cuda"), ""

    def __init__(self, plan, step_s, record_s, at_once_s=26e-3, fails=False):
        self.plan, self.step_s, self.record_s, self.at_once_s, self.fails = plan, step_s, record_s, at_once_s, fails
        self.now = self.free = 0.0  # of the host; when the device has done what was launched
        self.balances, self.recordings, self.timed, self.wide = {}, {}, {}, {}
        self.slots, self.angles = 512, {}
        self.at_once, self.in_slices, self.widths = [], [], []  # widths of recordings, and of steps with drafts
        self.sampler = SimpleNamespace(logits=torch.zeros(1))

    def start(self, prompts, sampling, room):
        self.at = 0
        return self.step()

    def step(self):
        return self.launched(1, [])

    def verification(self, rows):
        return self.wide.setdefault(rows, SimulatedStep(self, rows))

    def record_aside(self, rows, before):
        self.now += 150e-6
        return self.verification(rows)

    def verify(self, drafts, rows):
        step = self.verification(rows)
        step.new = not step.ready
        if step.new:
            self.at_once.append(rows)
            self.now = self.free = max(self.now, self.free) + self.at_once_s
            step.ready = True
        self.widths.append(rows)
        step.result = self.launched(rows, [*drafts, *[drafts[-1]] * (rows - 1 - len(drafts))])
        return step

    def launched(self, rows, drafts):
        self.now += LAUNCH_S
        self.free = max(self.now, self.free) + self.step_s(rows)
        drawn = self.answer[self.at : self.at + rows]
        right = next((i for i, (a, b) in enumerate(zip(drafts, drawn, strict=False)) if a != b), len(drafts))
        self.at += right + 1
        made = torch.tensor([right, *drawn] if drafts else drawn)
        made.until = self.free
        return made

    @contextmanager
    def clock(self):
        """Inside, the loop's clock is this device's."""
        gpu = self

        class Fetch:
            def __init__(self, made):
                self.made, self.until = made, made.until

            def get(self):
                gpu.now = max(gpu.now, self.until) + TEXT_S
                return self.made.tolist()

        time = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.now)
        loop = "lowq_cli.engine.stream"
        with mock.patch.multiple(loop, Fetch=Fetch, time=time), mock.patch.object(drafting, "time", time):
            yield

    def text(self, tokenizer, prompt, answer, drafts=True, drafter=NGram):
        """Seconds of the tokens after the first, and the generation."""
        self.answer = answer + [0] * 64
        with self.clock():
            how = {"stop_ids": frozenset(), "stop": [], "limited_by": "length", "began": self.now}
            how["drafting"] = drafting.FromHost(drafter(), self) if drafts else None
            g = Generation(self, tokenizer, [prompt], Sampling(), len(answer), **how)
            for _ in g.pieces():
                pass
        assert g.tokens[0] == answer
        return g.decode_s, g


class SimulatedStep:
    ready = new = False

    def __init__(self, gpu, rows):
        self.gpu, self.rows, self.left, self.ended, self.error = gpu, rows, gpu.record_s, False, None

    def lend(self, until):
        spent = min(self.left, max(0.0, until - self.gpu.now))
        self.gpu.now, self.left = self.gpu.now + spent + 60e-6, self.left - spent
        self.ended = self.left <= 0

    def finish(self):
        self.gpu.now += self.left
        self.left, self.ended = 0.0, True
        if self.gpu.fails:
            self.error = RuntimeError("operation not permitted when stream is capturing")
        else:
            self.ready = True
            self.gpu.in_slices.append(self.rows)
