"""The weight files of a model's folder: their names, by the index where there are several; other formats are refused."""

from pathlib import Path

from lowq_cli.files.safetensors_io import check_file_name, read_json
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def folder_of(path: Path) -> Path:
    """The folder of a weight file given as the model. Raises UnsupportedError for files that lowq does not open."""
    if path.suffix == ".safetensors":
        return path.parent
    if any(path.match(p) for p in PICKLES):
        raise UnsupportedError(_pickle_message(path))
    raise NotFoundError(f"{path} is a file; give the folder that holds config.json and *.safetensors")


def _pickle_message(path: Path) -> str:
    return (
        f"{path} is a pickle, which can run any code when opened, so lowq does not; where you trust it, convert it with "
        f"transformers: AutoModelForCausalLM.from_pretrained({str(path.parent)!r}).save_pretrained(NEW), and give NEW"
    )


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files, in order. Raises NotFoundError, DamagedError or UnsupportedError with the way out."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        listed = weight_map(folder / INDEX)
        names = sorted({check_file_name(file, INDEX) for file in listed.values()})
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise DamagedError(f"{INDEX} lists {missing[0]}, which is not in {folder}; fetch {len(missing)} missing file(s)")
        return names
    present = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if len(present) == 1:
        return present
    if present:
        raise DamagedError(f"{folder} holds {len(present)} safetensors files and no {INDEX} that says which belong together")
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(f"{folder} is a LoRA adapter; give its base model, and the adapter by --lora")
    for pattern in PICKLES:
        for path in sorted(folder.glob(pattern)):
            raise UnsupportedError(_pickle_message(path))
    for path in sorted(folder.glob("*.gguf"), key=lambda p: ("mmproj" in p.name, p)):  # a tower is not a model
        raise NotFoundError(f"{folder} holds no *.safetensors but GGUF, which is named by its file: {path}")
    raise NotFoundError(f"{folder} holds no *.safetensors; give the folder of a Hugging Face model")


def weight_map(index: Path) -> dict[str, str]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise DamagedError(f"{index} has no weight_map from tensor names to file names")
    return listed


def check_index(index: Path, where: dict[str, str]) -> None:
    """Raise DamagedError unless every tensor in the index is in the file that the index names."""
    for tensor, file in weight_map(index).items():
        if where.get(tensor) != file:
            fault = f"is in {where[tensor]}" if tensor in where else "is in no file"
            raise DamagedError(f"{index.name} lists {tensor} in {file}, but it {fault}; fetch the model again")
