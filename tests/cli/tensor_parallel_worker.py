"""Run in each process of test_tensor_parallel: load each folder of argv; rank 0 saves logits, or the error, next to it."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import lowq
from lowq_cli import hf
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_packers.errors import LowqError

hf.leave_out()


def through_lowq(folder):
    with open_source(folder) as source:
        return load_model(source, dtype="float32")


def through_transformers(folder):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).eval()


def answer(path, load):
    model = load(path)
    packed = {n: list(m.weight.shape) for n, m in model.named_modules() if isinstance(m, lowq.QuantLinear)}
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(3, 19)[None]).logits
        tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, eos_token_id=[])
    try:
        model.state_dict()
        saved = "saved"
    except LowqError as e:
        saved = str(e)
    return {"logits": logits.tolist(), "tokens": tokens.tolist(), "packed": packed, "saved": saved}


for path in map(Path, sys.argv[1:]):
    loads = {"lowq": through_lowq, "transformers": through_transformers}
    for name in loads if (path / "both").exists() else ["lowq"]:
        try:
            found = answer(path, loads[name])
        except LowqError as e:
            found = {"error": str(e)}
        if dist.get_rank() == 0:
            (path / f"{name}.json").write_text(json.dumps(found))
        dist.barrier()
dist.destroy_process_group()
