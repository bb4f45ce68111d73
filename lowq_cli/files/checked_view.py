"""A view of a model for other libraries: a folder with only the checked files.

Given the model's folder, they would choose files themselves: config.json may name other weights or another config, a pickle
may be taken instead of a lone safetensors file, or an adapter may be applied.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowq_cli.files.resolution import TOKENIZER, check_tokenizer
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.source import CONFIG, Source, shard_name
from lowq_cli.files.weight_files import INDEX
from lowq_packers.atomic import scratch


def known_type(config: Mapping[str, Any]) -> Any:
    """A config.json's model_type as transformers names it: Kimi K2's code is a copy of DeepSeek V3's, MiMo's is a copy of
    Qwen 2's."""
    kind = config.get("model_type")
    if kind == "kimi_k2" and config.get("architectures") == ["DeepseekV3ForCausalLM"]:
        return "deepseek_v3"
    return "qwen2" if kind == "mimo" else kind


@contextmanager
def only_its_files(source: Source, **changed: Any) -> Iterator[Path]:
    """A folder with a source's config, weights (links to the open files) and companions, under their usual names.

    changed: fields of config.json to replace. The folder is removed after the block. Raises NotFoundError if a file cannot be
    read, DamagedError, UnsupportedError.
    """
    assert source.folder is not None
    check_tokenizer(source.folder)
    with scratch(Path(tempfile.gettempdir()), "lowq-view") as folder:
        n = len(source.files)
        numbered = enumerate(sorted(source.files), 1)
        names = {f: shard_name(i, n) for i, f in numbered}
        for file, name in names.items():
            if file.endswith(".safetensors"):
                (folder / name).symlink_to(source.opened(file))
        if n > 1:
            index = {"metadata": {"total_size": source.nbytes}, "weight_map": {t: names[f] for t, f in source.where.items()}}
            (folder / INDEX).write_text(json.dumps(index))
        config = {k: v for k, v in (source.config | changed).items() if k != "gguf"}
        if "model_type" in config:
            config["model_type"] = known_type(config)
        (folder / CONFIG).write_text(json.dumps(config))
        for path in source.companions():
            (held := folder / path.parent.relative_to(source.folder)).mkdir(exist_ok=True)
            if path.name == TOKENIZER:
                facts = {k: v for k, v in read_json(path).items() if not (k.endswith("_file") and isinstance(v, str))}
                (folder / TOKENIZER).write_text(json.dumps(facts))
            else:
                (held / path.name).symlink_to(path.resolve())
        yield folder
