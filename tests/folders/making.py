"""A published folder written anew: random weights in the layout of the hub, all other files in the publisher's form."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from published import GONE, LENGTH, SHARDS, VOCAB, Family
from safetensors.torch import load_file, save_file
from tiny import ODD, fields_of
from tokenizers import Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vocabularies import tokenizer

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
IDS = ("_token_id", "_token_index", "eos_token_id", "suppress_tokens")


def write(family: Family, folder: Path) -> Path:
    """The folder of a family, and nothing in it that its publisher would not have."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer(family.vocabulary, family.special, family.plain, _first(family))
    write_tokenizer(family, tokens, folder)
    config = _config(family, tokens)
    _json(folder / "config.json", config)
    if family.generation is not None:
        _json(folder / "generation_config.json", {"_from_model_config": True} | _with_ids(family.generation, tokens))
    _weights(family, folder, tokens)
    _json(folder / "config.json", config)
    return folder


def _json(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2, ensure_ascii=False))


def _first(family: Family) -> str:
    first = family.tokenizer.get("bos_token")
    return (first["content"] if isinstance(first, dict) else first) if family.writes_bos and first else ""


def _with_ids(facts: Any, tokens: Tokenizer, name: str = "") -> Any:
    """The facts with an id for each text of a token."""
    if isinstance(facts, dict):
        return {k: _with_ids(v, tokens, k) for k, v in facts.items() if v is not GONE}
    if isinstance(facts, list) and name.endswith(IDS):
        return [_with_ids(v, tokens, name) for v in facts]
    if isinstance(facts, str) and name.endswith(IDS):
        result = tokens.token_to_id(facts)
        assert result is not None, (name, facts)
        return result
    return facts


def _over(small: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    result = dict(small)
    for name, value in facts.items():
        if value is GONE:
            result.pop(name, None)
        else:
            nested = isinstance(value, dict) and isinstance(small.get(name), dict) and not name.startswith("rope")
            result[name] = _over(small[name], value) if nested else value
    return result


def _config(family: Family, tokens: Tokenizer) -> dict[str, Any]:
    default = CONFIG_MAPPING[family.model_type]().to_dict()
    small = fields_of(default, ODD.get(family.model_type, {})) | {"model_type": family.model_type}
    for part in (small, small.get("text_config") or {}):
        part |= {k: v for k, v in (("vocab_size", VOCAB), ("vocab_size_per_layer_input", VOCAB)) if k in part}
        part |= dict.fromkeys((k for k in LENGTHS if k in part), LENGTH)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            part.pop(name, None)
    facts = family.config | ({"text_config": family.text} if family.text is not None else {})
    return _with_ids(_over(small, facts), tokens)


def _weights(family: Family, folder: Path, tokens: Tokenizer) -> None:
    """Random ones, large enough to make texts of many words, as save_pretrained lays them out for the hub."""
    torch.manual_seed(0)
    facts = json.loads((folder / "config.json").read_text())
    if facts["model_type"] not in CONFIG_MAPPING:  # Kimi K2's code is DeepSeek V3's
        _json(folder / "config.json", facts | {"model_type": family.model_type})
    config = transformers.AutoConfig.from_pretrained(str(folder))
    model = getattr(transformers, family.model).from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() in (2, 3):
                p.normal_(0, min(p.shape[-2:]) ** -0.5)
        model.get_output_embeddings().weight[_no_text(tokens)] *= 0.1  # answers are words, not parts of characters
    model.save_pretrained(folder / "saved")
    weights: dict[str, torch.Tensor] = {}
    for file in (folder / "saved").glob("*.safetensors"):
        weights |= load_file(file)
    for file in (folder / "saved").iterdir():
        file.unlink()
    (folder / "saved").rmdir()
    write_shards(as_published(weights, family.model_type), folder, family.shards)


def as_published(weights: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """The tensors as published where transformers writes another form: experts in stacks, Qwen3-VL's transposed."""
    if model_type == "qwen3_vl_moe":
        return {n: t.mT.contiguous() if ".mlp.experts." in n else t for n, t in weights.items()}
    if model_type != "qwen3_5_moe":
        return weights
    layers: dict[str, dict[str, list[torch.Tensor]]] = {}
    result = {}
    for name in sorted(weights, key=lambda n: [int(part) if part.isdigit() else 0 for part in n.split(".")]):
        path, of_experts, rest = name.partition(".mlp.experts.")
        if of_experts:
            layers.setdefault(path, {}).setdefault(rest.split(".")[1], []).append(weights[name])
        else:
            result[name] = weights[name]
    for path, leaves in layers.items():
        gate, up, down = (torch.stack(leaves[leaf]) for leaf in ("gate_proj", "up_proj", "down_proj"))
        result |= {f"{path}.mlp.experts.gate_up_proj": torch.cat([gate, up], 1), f"{path}.mlp.experts.down_proj": down}
    return result


def _no_text(tokens: Tokenizer) -> list[int]:
    """Ids of the model that are no whole characters, or no token."""
    return [
        i for i in range(VOCAB) if tokens.id_to_token(i) is None or "\ufffd" in tokens.decode([i], skip_special_tokens=False)
    ]


def write_shards(weights: dict[str, torch.Tensor], folder: Path, how: str) -> None:
    """One file, or three and their index, under the names of SHARDS."""
    name_of = SHARDS[how]
    if name_of is None:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, where = sorted(weights), {}
    for i, part in enumerate(names[i::3] for i in range(3)):
        file = name_of(i, 3)
        save_file({n: weights[n] for n in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in weights.values())
    _json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def write_tokenizer(family: Family, tokens: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json with what versions 4 and 5 of transformers put there, templates, other files."""
    tokens.save(str(folder / "tokenizer.json"))
    facts, templates = dict(family.tokenizer), family.templates
    if "backend" not in facts and "extra_special_tokens" not in facts:
        added = json.loads(tokens.to_str())["added_tokens"]
        facts["added_tokens_decoder"] = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added}
    if templates and family.kept == "tokenizer_config.json":
        several = [{"name": n, "template": t} for n, t in templates.items()]
        facts["chat_template"] = several if len(templates) > 1 else templates["default"]
    elif templates and family.kept == "chat_template.json":
        _json(folder / family.kept, {"chat_template": templates["default"]})
    elif templates:
        (folder / family.kept).write_text(templates["default"])
    _json(folder / "tokenizer_config.json", facts)
    for name, content in family.extra.items():
        model = json.loads(tokens.to_str())["model"]
        if content == "vocab":
            _json(folder / name, model["vocab"])
        elif content == "merges":
            (folder / name).write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]) + "\n")
        else:
            _json(folder / name, content)
