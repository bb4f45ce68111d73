"""The bundled model with fewer layers."""

import json
import re
import shutil

from safetensors.torch import load_file, save_file

from lowq_cli.files.source import DEMO


def shallow(folder, layers=3):
    """The bundled model's first layers and its head: it speaks, and computes half as long."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    gone = re.compile(rf"model\.layers\.(?!({'|'.join(map(str, range(layers)))})\.)")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not gone.match(n)}, folder / "model.safetensors", {"format": "pt"})
    return folder
