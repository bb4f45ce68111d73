"""Train a LoRA adapter over 4-bit weights with PEFT (QLoRA), save it, and write text with it."""

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowq

TEXT = "The lighthouse keeper counted the ships each evening and wrote their names into a book that nobody else would read."


def main() -> None:
    lowq.quantize("demo", out="demo-4bit", bits=4, group=64, device="cpu", fresh=True)
    base = AutoModelForCausalLM.from_pretrained("demo-4bit", dtype=torch.float32)  # transformers opens lowq's folders
    tokenizer = AutoTokenizer.from_pretrained("demo-4bit")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    model.print_trainable_parameters()

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("loss:", " ".join(f"{x:.2f}" for x in losses))
    assert losses[-1] < losses[0]

    model.save_pretrained("adapter")
    adapted, _ = lowq.load("demo-4bit", device="cpu", lora="adapter")  # the packed weights stay as they are
    print("".join(lowq.stream(adapted, tokenizer, "The lighthouse keeper", max_new_tokens=12)))


if __name__ == "__main__":
    main()
