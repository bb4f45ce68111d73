"""Open a GGUF file of the Llama or Qwen families as a model source with Hugging Face's names, row order and config.

Tensors of the types in `formats.gguf.TYPES` are supported; an error names the first other one. A config.json next to the file
is used; without one, the metadata give the config. The tower of a model that takes images comes from the mmproj file next to
it (`gguf_tower`); without one, the model is opened as text alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowq_cli.files.resolution import check_config
from lowq_cli.files.safetensors_io import FileHeader, TensorHeader, read_json
from lowq_cli.files.shapes import text_config, whole
from lowq_cli.files.source import Source
from lowq_cli.interop.gguf_names import CLASSES, LAYER, PERMUTED, TOP, TYPES
from lowq_cli.interop.gguf_reader import Entry, read_gguf
from lowq_cli.interop.gguf_tokenizer import STOPS, tokenizer_folder
from lowq_cli.interop.gguf_tower import CLIP, GgufTower, Joined, PairSource, find_tower, tower_headers, with_processor
from lowq_packers import home
from lowq_packers.arch import families
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats.gguf import PLAIN

FIELDS = {  # field of config.json -> metadata key, without the architecture's prefix
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


ARCH_KEYS = (  # an architecture's metadata keys that `config_of` reads, or that have one value in all its models
    *(*FIELDS.values(), "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "vocab_size", "tensor_data_layout", "attention.causal"),
    *("rope.dimension_sections", "n_deepstack_layers"),  # of texts with images; equal positions rotate as one
)


def open_gguf(name: str, path: Path, headers_only: bool = False) -> Source:
    """The source of a GGUF file. Its `folder` holds the tokenizer, which is written there unless `headers_only`.

    Raises as `read_gguf`, and UnsupportedError for unknown architectures.
    """
    metadata, tensors, crc = read_gguf(path)
    arch = str(metadata.get("general.architecture"))
    if arch == CLIP:
        raise UnsupportedError(f"{path} is the tower of a model; give the file of its text, and this one is found next to it")
    if arch not in CLASSES:
        raise UnsupportedError(f"{path} holds the architecture {arch}; lowq reads {', '.join(sorted(CLASSES))}")
    tower, note = find_tower(path, arch, metadata)
    config = _whole_config(path, arch, metadata, tensors, tower)
    headers, stored = _text_headers(path, config, arch, tensors)
    where, files = dict.fromkeys(headers, path.name), {path.name: FileHeader(path, headers, path.stat().st_size, crc)}
    joined = dict[str, Joined]()
    cache = home.cache_dir() / "tokenizers" / f"{path.stem}-{crc:08x}"
    folder = path.parent if headers_only else tokenizer_folder(path, metadata, cache)
    if tower:
        tower_tensors, of_tower, joined = tower_headers(tower)
        headers, stored = headers | tower_tensors, stored | of_tower
        where |= dict.fromkeys(tower_tensors, tower.path.name)
        files[tower.path.name] = FileHeader(tower.path, tower_tensors, tower.path.stat().st_size, tower.crc)
        if not headers_only:
            beside = Source(name, folder, {}, {}, {}, {})
            folder = with_processor(tower, beside, cache.with_name(f"{cache.name}-{tower.crc:08x}"))
    notes = (note,) if note else ()
    return PairSource(name, folder, config | {"gguf": stored}, headers, files, where, notes, joined=joined)


def _whole_config(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Entry], tower: GgufTower | None
) -> dict[str, Any]:
    """The config of the model: of text and tower, or of the text alone."""
    config_path = path.with_name("config.json")
    if not config_path.is_file():
        text = config_of(path, arch, metadata, tensors)
        return tower.config(text, metadata) if tower else text
    check_config(config := read_json(config_path), config_path)
    _check_sizes(text_config(config), arch, metadata, path)
    family = families().get(str(config.get("model_type")))
    if tower and config.get("model_type") != tower.model_type:
        raise DamagedError(
            f"{config_path} is of the model_type {config.get('model_type')}, {tower.path.name} of {tower.model_type}"
        )
    if tower or not family or not family.text:
        return config
    rope = text_config(config).get("rope_parameters") or text_config(config).get("rope_scaling") or {}
    plain = {k: v for k, v in rope.items() if not k.startswith("mrope") and v != "mrope"}  # equal positions rotate as one
    text = {k: v for k, v in text_config(config).items() if k not in ("vision_config", "rope_scaling")}
    text |= {k: config[k] for k in ("tie_word_embeddings",) if k in config} | {"rope_parameters": plain or None}
    return text | {"model_type": TYPES[CLASSES[arch]], "architectures": [CLASSES[arch]]}


def _text_headers(
    path: Path, config: Mapping[str, Any], arch: str, tensors: Mapping[str, Entry]
) -> tuple[dict[str, TensorHeader], dict[str, dict[str, Any]]]:
    """The text's tensors by the model's names, and those among them that the format decodes."""
    heads = _heads(text_config(config), path) if arch in PERMUTED else {}
    prefix, head = _place(config)
    headers, stored = dict[str, TensorHeader](), dict[str, dict[str, Any]]()
    for theirs, t in tensors.items():
        ours = _name(theirs)
        if ours is None:
            if theirs != "rope_freqs.weight":
                raise UnsupportedError(f"{path}: {theirs} has no place in a Hugging Face model of this family")
            continue
        head_count = heads.get(ours.split(".")[-2])
        if head_count and len(t.shape) != 2:
            raise UnsupportedError(f"{path}: {theirs} is a bias in llama.cpp's order of rows, which lowq does not read")
        ours = prefix + ours.removeprefix("model.") if ours.startswith("model.") else head + ours.removeprefix("lm_head")
        if t.kind not in PLAIN or head_count:
            stored[ours] = {"type": t.kind, "shape": list(t.shape), "heads": head_count}
            headers[ours] = TensorHeader((t.nbytes,), "U8", t.offset)
        else:
            headers[ours] = TensorHeader(t.shape, t.kind, t.offset)
    return headers, stored


def _place(config: Mapping[str, Any]) -> tuple[str, str]:
    """The prefix of the text's names in the model, and its head's name."""
    try:
        model = read_config(config)[1]
    except NotPlain:
        return "model.", "lm_head"
    return model.prefix, model.head


def _heads(config: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The numbers of heads for projections that llama.cpp permutes by head. Keys have as many as queries by default."""
    q = whole(config, "num_attention_heads")
    if not q:
        raise DamagedError(
            f"{path.with_name('config.json')} lacks num_attention_heads, by which rows of {path.name} are ordered"
        )
    return {"q_proj": q, "k_proj": whole(config, "num_key_value_heads") or q}


def _check_sizes(config: Mapping[str, Any], arch: str, metadata: Mapping[str, Any], path: Path) -> None:
    """Raise DamagedError if the config.json next to a GGUF file contradicts the file's metadata."""
    facts = {field: metadata.get(f"{arch}.{key}") for field, key in FIELDS.items() if field != "max_position_embeddings"}
    rope = config.get("rope_parameters") or {}
    ours = {**config, "rope_theta": config.get("rope_theta", rope.get("rope_theta") if isinstance(rope, Mapping) else None)}
    if facts["num_attention_heads"] is not None:
        ours["num_key_value_heads"] = ours.get("num_key_value_heads") or ours.get("num_attention_heads")
    facts |= {"rope_theta": metadata.get(f"{arch}.rope.freq_base"), "head_dim": metadata.get(f"{arch}.attention.key_length")}
    for field, theirs in facts.items():
        mine = ours.get(field)
        numbers = type(mine) in (int, float) and type(theirs) in (int, float)
        if mine is not None and theirs is not None and not (numbers and abs(mine - theirs) <= 1e-5 * abs(theirs)):
            raise DamagedError(f"config.json next to {path} says {field}={str(mine)[:40]}, the file {str(theirs)[:40]}")


def _name(theirs: str) -> str | None:
    """Hugging Face's name of a tensor; None if it has no such tensor."""
    stem, _, leaf = theirs.rpartition(".")
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit():
        ours = next((hf for hf, gg in LAYER.items() if gg == parts[2]), None)
        return None if ours is None else f"model.layers.{parts[1]}.{ours}.{leaf}"
    ours = next((hf for hf, gg in TOP.items() if gg == stem), None)
    return None if ours is None else f"{ours}.{leaf}"


def config_of(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Entry]) -> dict[str, Any]:
    """Make a config.json from metadata. Raises UnsupportedError if the metadata are not sufficient."""
    if "rope_freqs.weight" in tensors or metadata.get(f"{arch}.rope.scaling.type") not in (None, "none"):
        raise UnsupportedError(f"{path} scales its rotary frequencies; put the model's config.json next to it")
    for key, value in metadata.items():
        if key.startswith(f"{arch}.") and key.removeprefix(f"{arch}.") not in ARCH_KEYS:
            raise UnsupportedError(
                f"{path} has {key}={str(value)[:40]}, which lowq does not know; put the model's config.json next to it"
            )
    fields: dict[str, Any] = {field: metadata.get(f"{arch}.{key}") for field, key in FIELDS.items()}
    if missing := [FIELDS[f] for f, v in fields.items() if v is None]:
        raise DamagedError(f"{path} lacks the metadata {arch}.{missing[0]}; put the model's config.json next to it")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise DamagedError(f"{path} lacks token_embd.weight")
    fields["head_dim"] = metadata.get(f"{arch}.attention.key_length") or fields["hidden_size"] // fields["num_attention_heads"]
    usual = {"attention.value_length": fields["head_dim"], "rope.dimension_count": fields["head_dim"], "attention.causal": True}
    for key, value in usual.items():
        if (value_there := metadata.get(f"{arch}.{key}", value)) != value:
            raise UnsupportedError(
                f"{path} has {arch}.{key}={str(value_there)[:40]}; lowq computes such models with {value} only"
            )
    stops = [i for name in STOPS if (i := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None]
    tokens = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    tokens["eos_token_id"] = (stops if len(stops) > 1 else stops[0]) if stops else None
    return (
        fields
        | {k: v for k, v in tokens.items() if v is not None}
        | {
            "model_type": TYPES[CLASSES[arch]],
            "architectures": [CLASSES[arch]],
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "rope_theta": metadata.get(f"{arch}.rope.freq_base", 10000.0),
            "hidden_act": "silu",
            "dtype": "float16",
        }
    )
