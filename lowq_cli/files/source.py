"""Sources of weights: a model folder, a Hugging Face hub id, or the bundled "demo". They are opened lazily and read by rows.

Opening reads only config.json and the safetensors headers, and checks them against each other and the index. `rows` and
`read` then read one tensor, or some rows of one, into new memory.
"""

import difflib
import hashlib
import mmap
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from lowq_cli import cached_models
from lowq_cli.files.mapped_file import MappedFile, state_of
from lowq_cli.files.resolution import check_companions, check_config
from lowq_cli.files.safetensors_io import (
    ITEMSIZE,
    FileHeader,
    TensorHeader,
    check_file_name,
    read_bytes,
    read_header,
    read_into,
    read_json,
    torch_dtype,
)
from lowq_cli.files.templates import OTHERS, in_one_folder
from lowq_cli.files.text_alone import lifted, text_alone
from lowq_cli.files.weight_files import INDEX, SINGLE, check_index, folder_of, weight_files, weight_map
from lowq_cli.state import DEMO, known, name_of, user_path
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, UnsupportedError, UsageError, is_no_refusal
from lowq_packers.regular import name_of_open, open_regular, read_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

CONFIG, REPORT, LOG = "config.json", "lowq_report.json", "lowq.log"
MODELOPT = "hf_quant_config.json"  # ModelOpt's file with settings that its older config.json files lack
HEAD, HEAD_NOTES, HEAD_STATE = "draft", "lowq_draft.json", "lowq-draft-state.safetensors"  # a draft head's folder and files
JOURNAL = "lowq-journal.jsonl"  # journal of an unfinished run
STAGED = "lowq-calibrated-"  # + run hash: the folder of a calibration's finished layers
PARTIAL = ".partial"  # suffix of a file that is not complete yet
COMPANIONS = (  # files that a checkpoint needs besides its weights; copied unchanged
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "chat_template*", f"{OTHERS}/*.jinja", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "1_Pooling/config.json",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
HUB_ID = re.compile(r"(?!.*\.(gguf|safetensors)$)[\w.-]+(/[\w.-]+)?")
WANTED = ["*.safetensors", "*.json", "README.md", *COMPANIONS]  # README.md's front matter names the licence
_FOLDERS = [p for i, c in enumerate(OTHERS) for p in (f"{OTHERS[:i]}[!{c}]*/*", f"{OTHERS[:i]}/*")]  # all folders but OTHERS
UNWANTED = [*_FOLDERS, f"{OTHERS}?*/*", "consolidated*"]  # folders of other formats, and Mistral's second copy of the weights
SAMPLES, SAMPLE_BYTES = 16, 4096  # samples per file and their bytes, for `identity`


def shard_name(number: int, of: int) -> str:
    """The name that transformers gives the weight file of this number (from 1) among `of` files."""
    return SINGLE if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


@dataclass(frozen=True)
class Cut:
    """The position of one (N, K) matrix in a tensor: its expert in a stack, its rows (None: all), whether stored as (K, N).

    step: of the rows; 2 if the rows of two matrices alternate.
    """

    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    step: int = 1

    def of(self, W: "torch.Tensor") -> "torch.Tensor":
        """The matrix, as a view of the tensor."""
        W = W if self.expert is None else W[self.expert]
        W = W.T if self.transposed else W
        return W if self.rows is None else W[slice(*self.rows, self.step)]


WHOLE = Cut()


@dataclass
class Source:
    """A model to quantize: its config and the header of every tensor, in the order of files and of bytes in them.

    `folder` is None if only headers were downloaded (a dry run on a hub id); tensors of such a source cannot be read.
    """

    name: str
    folder: Path | None
    config: dict[str, Any]
    headers: dict[str, TensorHeader]
    files: dict[str, FileHeader]
    where: dict[str, str]  # tensor -> file name
    notes: tuple[str, ...] = ()  # notes to print before quantizing
    stored_as: str = ""  # the name of the format that its weights are decoded from
    pinned: bool = False  # `read` into pinned pages, which a GPU copies asynchronously
    _fds: dict[str, int] = field(default_factory=dict, repr=False)
    _states: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)  # of the open files, when they were opened
    _maps: dict[str, mmap.mmap] = field(default_factory=dict, repr=False)
    mapped_files: dict[str, MappedFile] = field(default_factory=dict, repr=False)  # those of which `mapped` gave views
    _opening: RLock = field(default_factory=RLock, repr=False)  # tensors are read by several threads

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(h.nbytes for h in self.headers.values())

    @property
    def params(self) -> int:
        """Elements of all tensors."""
        return sum(h.numel for h in self.headers.values())

    @cached_property
    def identity(self) -> str:
        """A hash of config and headers, and of each file's size, time of change and 16 samples of 4 KiB.

        It is cheap to compute, and differs for every other model: by the samples, or after an edit in place by the time.
        """
        h = hashlib.sha256(repr(sorted(self.config.items(), key=lambda kv: kv[0])).encode())
        for name, header in sorted(self.files.items()):
            line = f"{name} {header.size} {header.crc} {os.fstat(self._fd(name)).st_mtime_ns}"
            h.update(line.encode(errors="surrogateescape"))  # names of files need not be UTF-8
            span = max(0, header.size - SAMPLE_BYTES)
            for i in range(SAMPLES):
                at = span * i // (SAMPLES - 1)
                h.update(read_bytes(self._fd(name), at, min(SAMPLE_BYTES, header.size - at), name))
        return h.hexdigest()[:16]

    @property
    def held_bytes(self) -> int:
        """Bytes that reading keeps in memory: 0 here; a whole tensor in sources that decode tensors."""
        return 0

    def companions(self) -> list[Path]:
        """Tokenizer and generation files to copy, sorted by name. Raises as `check_companions`."""
        if self.folder is None:
            return []
        paths = {p for pattern in COMPANIONS for p in self.folder.glob(pattern) if p.exists()}
        paths = {p for p in paths if not p.is_dir() or p.suffix in (".json", ".jinja")}  # such a folder is in a file's place
        return check_companions(sorted(paths, key=lambda p: p.name))

    def companion_files(self) -> dict[str, bytes]:
        """Names and contents of the companions, all in one folder as in a checkpoint. Raises as `companions`."""
        paths = self.companions()
        siblings = {p.name: read_regular(p) for p in paths if p.parent == self.folder}
        return in_one_folder(siblings, {p.stem: read_regular(p).decode() for p in paths if p.parent != self.folder})

    def read(self, name: str, first: int = 0, count: int | None = None) -> "torch.Tensor":
        """`count` elements of a tensor from flat position `first`, as a 1-D CPU tensor of the stored dtype in new memory."""
        import torch

        header, file = self.headers[name], self.where[name]
        count = header.numel - first if count is None else count
        t = torch.empty(count, dtype=torch_dtype(header.dtype), pin_memory=self.pinned)
        at = header.offset + first * ITEMSIZE[header.dtype]
        read_into(memoryview(t.view(torch.uint8).numpy()), self._fd(file), at, file)  # type: ignore[arg-type]
        self._check(file)
        return t

    def read_raw(self, name: str, first: int, nbytes: int) -> bytearray:
        """`nbytes` bytes of a tensor of any dtype, from byte `first`."""
        raw = read_bytes(self._fd(self.where[name]), self.headers[name].offset + first, nbytes, self.where[name])
        self._check(self.where[name])
        return raw

    def read_into(self, name: str, first: int, view: memoryview) -> None:
        """Fill `view` (bytes) with a tensor's bytes from byte `first`."""
        read_into(view, self._fd(self.where[name]), self.headers[name].offset + first, self.where[name])
        self._check(self.where[name])

    def mapped(self, names: "Sequence[str]") -> "torch.Tensor | None":
        """Tensors that are contiguous in one file, as one flat tensor on a private mapping of its pages, without a copy:
        writes stay in this process. None if they are not contiguous, differ in dtype or are not aligned to their elements.

        If another program truncates the file while it is mapped, a signal ends this process.
        """
        import torch

        headers, file = [self.headers[n] for n in names], self.where[names[0]]
        first, size = headers[0].offset, ITEMSIZE[headers[0].dtype]
        behind = all(h.offset + h.nbytes == g.offset for h, g in pairwise(headers))
        if (
            not behind
            or first % size
            or {(self.where[n], h.dtype) for n, h in zip(names, headers, strict=True)} != {(file, headers[0].dtype)}
        ):
            return None
        with self._opening:
            if file not in self._maps:
                self.mapped_files[file] = MappedFile(self._fd(file), self.files[file].path, self._states[file])
                self._maps[file] = mmap.mmap(self._fd(file), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        count = sum(h.numel for h in headers)
        return torch.frombuffer(self._maps[file], dtype=torch_dtype(headers[0].dtype), count=count, offset=first)

    def all_mapped(self) -> tuple[MappedFile, ...]:
        """All weight files, of which another library (transformers) has mapped the pages."""
        return tuple(MappedFile(self._fd(file), self.files[file].path, self._states[file]) for file in self.files)

    def _fd(self, file: str) -> int:
        if self.folder is None:
            raise UsageError(f"only the headers of {self.name} were fetched (dry run)")
        with self._opening:
            if file not in self._fds:
                self._fds[file] = self._as_described(self.files[file])
                self._states[file] = state_of(self._fds[file])
            return self._fds[file]

    def _check(self, file: str) -> None:
        """Raise DamagedError if another program has written to the open file, parts of which may be of another model; 1 us."""
        if state_of(self._fds[file]) != self._states[file]:
            raise DamagedError(
                f"{self.files[file].path} was written over while it is read, so what was read may be of two models; "
                "start again once it is whole"
            )

    def _as_described(self, file: FileHeader) -> int:
        """Open the file. Raises DamagedError if its size differs from the one its header was checked against, as reading
        mapped pages beyond a file's end raises a signal."""
        fd = open_regular(file.path)
        if (size := os.fstat(fd).st_size) != file.size:
            os.close(fd)
            raise DamagedError(f"{file.path} had {file.size} bytes when its header was read and has {size} now; fetch it again")
        return fd

    def opened(self, file: str) -> str:
        """A path to one of the open files, through which other libraries read the same file."""
        return name_of_open(self._fd(file), self.files[file].path)

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._maps.clear()  # a mapping lives as long as the tensors in it

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(model: str | os.PathLike[str], headers_only: bool = False) -> Source:
    """Open a model by name: "demo", a folder, or a hub id (downloaded; only its headers if `headers_only`).

    Raises NotFoundError, DamagedError (malformed or contradictory files), UnsupportedError (pickles,
    adapters), each with a way out. interop.foreign.open_foreign opens GGUF files and HQQ's qmodel.pt.
    """
    name = name_of(model)
    if name == "demo":
        return _open_folder("demo", DEMO)
    path = user_path(name)
    if path.is_dir():
        return _open_folder(name, path)
    if path.is_file():
        return _open_folder(name, folder_of(path))
    if path.is_absolute() or name.startswith((".", "~")) or not HUB_ID.fullmatch(name):
        way_out = nearby(name) or "give a model folder, org/name, or demo"
        raise NotFoundError(f"there is no folder {name}, and that is not a hub id either; {way_out}")
    _refuse_mistyped(name)
    return _hub_headers(name) if headers_only else _open_folder(name, _download(name))


def _refuse_mistyped(name: str) -> None:
    """Raise NotFoundError for a possible hub id that looks like a folder: its parent exists, or it lacks an organisation."""
    if ("/" not in name or user_path(name).parent.is_dir()) and (near := nearby(name)):
        raise NotFoundError(f"no folder {name} here; {near} (a model of the hub is called org/name)")


def nearby(name: str) -> str:
    """The most similar name of a sibling folder, a known checkpoint or a cached model: "did you mean ...?"; or ""."""
    path = user_path(name)
    siblings = [p for p in path.parent.glob("*") if os.path.isfile(p / CONFIG) or p.suffix == ".gguf"]
    spelled = {p.name: str(p) for p in (*(k.checkpoint for k in known()), *siblings)}
    spelled |= {name: name for name in cached_models.names().values()}
    spelled["demo"] = "demo"  # the bundled model takes precedence over a folder of that name
    near = difflib.get_close_matches(path.name, spelled, n=1, cutoff=0.75)
    return f"did you mean {spelled[near[0]]}?" if near else ""


def check_there(*models: str | os.PathLike[str] | None) -> None:
    """Raise the errors of opening these models before heavy imports; only for folders, without hub requests."""
    for model in models:
        if model is None:
            continue
        path = user_path(model)
        other_kind = path.suffix in (".gguf", ".pt") or (path / "qmodel.pt").is_file()  # interop.foreign opens those
        if not other_kind and (path.exists() or not HUB_ID.fullmatch(str(model))):
            open_source(model, headers_only=True).close()
        elif not path.exists() and str(model) != "demo":
            _refuse_mistyped(str(model))


def _open_folder(name: str, folder: Path) -> Source:
    """Open a local folder after checking config, index and headers."""
    config_path = folder / "config.json"
    if (folder / JOURNAL).is_file() and not config_path.is_file():
        raise NotFoundError(f"the run that writes {folder} has not finished; run the same `lowq quantize` again, it continues")
    files = weight_files(folder)
    if not config_path.is_file():
        raise NotFoundError(f"{folder} has no config.json; give the folder of a Hugging Face model")
    config = read_json(config_path)
    check_config(config, config_path)
    config = lifted(config)
    if (folder / MODELOPT).is_file():
        _add_modelopt(config, folder / MODELOPT)
    parsed = {file: read_header(folder / file) for file in files}
    headers: dict[str, TensorHeader] = {}
    where: dict[str, str] = {}
    for file, header in parsed.items():
        for tensor, h in header.tensors.items():
            if tensor in where:
                raise DamagedError(f"{tensor} is in {where[tensor]} and in {file}; remove the stale file")
            headers[tensor], where[tensor] = h, file
    if files != [SINGLE] and (folder / INDEX).is_file():
        check_index(folder / INDEX, where)
    if not headers:
        raise DamagedError(f"{folder} holds no tensors")
    return Source(name, folder, text_alone(config, headers), headers, parsed, where)


def _add_modelopt(config: dict[str, Any], path: Path) -> None:
    """Copy the weight settings of ModelOpt's file into `config`. Raises DamagedError if they contradict each other."""
    quantization = read_json(path).get("quantization")
    if not isinstance(quantization, dict):
        raise DamagedError(f"{path} has no quantization; fetch the model again")
    ours = config.setdefault("quantization_config", {**quantization, "quant_method": "modelopt"})
    theirs = quantization.get("quant_algo")
    if isinstance(ours, dict) and ours.get("quant_algo") != theirs:
        raise DamagedError(f"{path} says quant_algo={str(theirs)[:40]}, config.json {str(ours.get('quant_algo'))[:40]}")


def _download(repo: str) -> Path:
    """Download a hub model's safetensors, JSON and tokenizer files; returns the folder in the hub cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    from lowq_cli.files.waiting import announce

    announce(Path(constants.HF_HUB_CACHE, ".locks", repo_folder_name(repo_id=repo, repo_type="model")), repo)
    try:
        return Path(snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as e:  # of the hub's client and the network: `_hub_error` says which
        if is_no_refusal(e):
            raise
        raise _hub_error(repo, e) from e


def _hub_headers(repo: str) -> Source:
    """A hub model's config and headers, from the local cache or by range requests, without downloading weights."""
    from huggingface_hub import HfApi, get_safetensors_metadata, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError, HFValidationError):  # otherwise headers come from the hub
        cached = Path(snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True))
        if _is_whole(cached):
            return _open_folder(repo, cached)
    try:
        HfApi().model_info(repo, timeout=10)  # fails at once without a network, where hf_hub_download retries for 24 s
        config = read_json(Path(hf_hub_download(repo, "config.json")))
        metadata = get_safetensors_metadata(repo)
    except Exception as e:  # of the hub's client and the network: `_hub_error` says which
        if is_no_refusal(e):
            raise
        raise _hub_error(repo, e) from e
    headers: dict[str, TensorHeader] = {}
    where: dict[str, str] = {}
    files: dict[str, FileHeader] = {}
    for file, meta in sorted(metadata.files_metadata.items()):
        tensors = {}
        for tensor, info in sorted(meta.tensors.items(), key=lambda kv: kv[1].data_offsets):
            if info.dtype not in ITEMSIZE:
                raise DamagedError(f"{repo}: {tensor} has dtype {info.dtype!r}; known are {', '.join(ITEMSIZE)}")
            tensors[tensor] = TensorHeader(tuple(info.shape), info.dtype, info.data_offsets[0])
            where[tensor] = file
        files[file] = FileHeader(Path(file), tensors, sum(t.nbytes for t in tensors.values()), 0)
        headers |= tensors
    return Source(repo, None, text_alone(lifted(config), headers), headers, files, where)


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot in the hub cache has its config and all weight files, intact or not."""
    if (folder / INDEX).is_file():
        whole = all((folder / check_file_name(file, INDEX)).is_file() for file in weight_map(folder / INDEX).values())
    else:
        whole = any(folder.glob("*.safetensors"))
    return whole and (folder / "config.json").is_file()


def _hub_error(repo: str, e: Exception) -> LowqError:
    """The error for a failed hub call. An unforeseen failure becomes a NotFoundError with the failure's first line."""
    kind = type(e).__name__
    first = str(e).strip().splitlines()[0] if str(e).strip() else kind
    if kind == "GatedRepoError":
        return NotFoundError(f"{repo} is gated: accept its terms on huggingface.co, then run `hf auth login`")
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError"):
        return NotFoundError(f"huggingface.co has no model {repo} that you may read (or it lacks the file); check the name")
    if kind == "NotASafetensorsRepoError":
        return UnsupportedError(f"{repo} has no safetensors weights; pickles can run any code, so lowq does not open them")
    answered = getattr(e, "response", None) is not None  # the client's errors of HTTP are OSErrors, too
    offline = kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled") or "Connect" in kind
    if offline or (isinstance(e, OSError) and not answered and not e.filename):  # a file's error is one of the hub's cache
        return NotFoundError(
            f"cannot reach huggingface.co and {repo} is not in the local cache; go online, give a model folder, or use: demo"
        )
    return NotFoundError(f"cannot fetch {repo}: {kind}: {first}")
