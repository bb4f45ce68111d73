"""Tiny models of random weights, and a client that asks an engine for their texts."""

import json
import queue
import random
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from safetensors.torch import save_file

from lowq_cli.engine import stream
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.graph import keep
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.draft_costs import DraftCosts
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.request import Draw, Request

SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TARGETS = ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "out_proj")
TOKENIZER = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "".join(chr(64 + i) for i in ids))


def build(kind, **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **SMALL | {"max_position_embeddings": 512} | settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for path, p in model.named_parameters():
        p.data *= 4 if p.dim() > 1 and "embed" not in path else 1
    model.generation_config.eos_token_id = None
    return model


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
ALONE = WeakKeyDictionary()  # model -> answers that were computed for it


def alone(model, prompt, n=12, kv="16", tokenizer=TOKENIZER, **how):
    """The answer of one text by a decoder of its own, computed once for all tests."""
    made, case = ALONE.setdefault(model, {}), (tuple(prompt), n, kv, *sorted(how.items()))
    if case not in made:
        text = stream(model, tokenizer, prompt, max_new_tokens=n, decoder=decoder_of(model, kv), draft="none", **how)
        list(text)
        made[case] = text.tokens[0]
    return made[case]


class Client:
    """An engine and what it says. On a GPU its cache is small, as several tests may run there at once."""

    def __init__(self, model, **how):
        if torch.cuda.is_available():
            how = {"cache_tokens": 8192} | how
        self.engine = how.pop("engine", engine_of)(model, how.pop("waiting", 500), **how)
        assert isinstance(self.engine, ContinuousEngine)
        self.events = queue.Queue()
        self.heard = {}
        self.engine.start(lambda batch: [self.events.put(e) for e in batch])

    def ask(self, prompt, n=12, **kw):
        return self.engine.submit(Request(tuple(prompt), n, frozenset(kw.pop("stop", ())), Draw(**kw)))

    def hear(self, until=lambda heard: False):
        """Take events until those of all known requests have ended, or `until` says so."""
        number, event = self.events.get(timeout=60)
        self.heard.setdefault(number, []).append(event)

    def follow(self, *numbers):
        while not all(n in self.heard and self.heard[n][-1].finish_reason for n in numbers):
            self.hear()
        return [self.heard[n] for n in numbers]

    def tokens(self, *numbers):
        return [[e.token for e in events if e.token is not None] for events in self.follow(*numbers)]


class Replayed:
    """A recorded pass on a CPU: computed again from the same tensors. Recording it does not move the texts of `rows` on."""

    graph, noted = None, None

    def __init__(self, step, rows):
        self.step, self.count = step, 0
        back = keep([rows.token, rows.pos])
        step()
        back()

    def replay(self):
        self.count += 1
        self.logits.copy_(self.step())


class Free(DraftCosts):
    """Costs of an engine's drafts by which rows and guesses take no time, so that every draft is checked."""

    def __init__(self, costs):
        vars(self).update(vars(costs))
        self.gap_s = 0.0

    def launched(self, seconds, ahead):
        pass

    def guess_s(self, plain_s):
        return 0.0

    read_s = guess_s

    def pass_s(self, rows, texts, plain_s):
        return plain_s


def check_all(drafts):
    """Let an engine's drafts be checked from now on, whatever they bring."""
    drafts.costs, drafts._trials = Free(drafts.costs), None


def prompts(*lengths, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 320, (n,), generator=g).tolist() for n in lengths]


def adapter(folder, model, seed, rank=3):
    """An adapter of random factors for some of a model's layers."""
    rng, tensors = random.Random(seed), {}
    g = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if name.endswith(TARGETS) and rng.random() < 0.7:
            n, k = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, k, generator=g) / k**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n, rank, generator=g)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return folder
