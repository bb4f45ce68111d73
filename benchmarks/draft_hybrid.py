"""Train a small hybrid model on a CPU in a minute: three layers of gated delta and one of attention, as in Qwen3-Next.

    python benchmarks/draft_hybrid.py FOLDER --texts FILE --tokenizer MODEL

`drafts.py --parts same --models hybrid=FOLDER` then compares its texts with drafts and without: recurrent states have to be
those after the last right draft. The tokenizer is that of MODEL, so that MODEL can also draft for it.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

BATCH, LENGTH, RATE = 4, 128, 3e-3  # sequences of a step, their tokens, the largest learning rate
LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def train(ids: torch.Tensor, vocab: int, steps: int) -> torch.nn.Module:
    """A model after so many steps on windows of ids (n,)."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes = {"vocab_size": vocab, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": len(LAYERS)}
    dense = {"num_experts": 0, "mlp_only_layers": list(range(len(LAYERS))), "layer_types": LAYERS}
    more = {"max_position_embeddings": 1024, "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3_next", **sizes, **heads, **linear, **dense, **more)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for step in range(steps):
        at = torch.randint(0, len(ids) - LENGTH, (BATCH,))
        windows = torch.stack([ids[i : i + LENGTH] for i in at.tolist()])
        loss = model(windows, labels=windows).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {float(loss.detach()):.2f} nats a token", flush=True)
    return model.to(torch.bfloat16)


def main() -> None:
    """Train and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    ids = torch.tensor(tokenizer(args.texts.read_text())["input_ids"])
    train(ids, len(tokenizer), args.steps).save_pretrained(args.folder)  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, args.folder / name)


if __name__ == "__main__":
    main()
