"""Part of hybrids_cpu.py: a transformers model in llama.cpp, in this process, with a decoder's `start` and `step`.

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*
    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama
    pip install diskcache

llama.cpp's converter writes the model to a file without a tokenizer. Its quantizer makes a 4-bit file from that, in which the
embedding and the head stay in bf16, as lowq's do. A context is what llama-bench makes: passes of 512 tokens, flash attention
where it can.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch

FTYPES = {"F32": 0, "Q4_0": 2, "Q4_K_M": 15}  # llama_ftype
BF16 = 30  # ggml_type
AUTO = -1  # llama_flash_attn_type
BATCH, PASS = 2048, 512  # tokens of a call, and of a pass


def library(folder: Path) -> Any:
    """The module llama_cpp of an unpacked and built source distribution, without its log."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder / "build" / "bin")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import llama_cpp

    if not hasattr(llama_cpp, "silent"):
        llama_cpp.silent = llama_cpp.llama_log_callback(lambda *_: None)  # the library holds no reference to it
        llama_cpp.llama_log_set(llama_cpp.silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
    return llama_cpp


def converted(model: Any, work: Path, folder: Path, form: str) -> Path:
    """A GGUF file of a model in a form of FTYPES, by way of the model's folder in fp32."""
    lib = library(folder)
    model.float().save_pretrained(work)
    sys.path.insert(0, str(folder / "vendor" / "llama.cpp"))
    import conversion
    import gguf

    def no_vocabulary(converter: Any) -> None:
        converter._set_vocab_none()
        converter.gguf_writer.add_vocab_size(converter.hparams["vocab_size"])

    converter = conversion.get_model_class(model.config.architectures[0])
    converter.set_vocab, converter.no_mtp = no_vocabulary, True
    whole, out = work / "F32.gguf", work / f"{form}.gguf"
    with torch.inference_mode():
        converter(work, gguf.LlamaFileType.ALL_F32, whole).write()
    if form == "F32":
        return whole
    how = lib.llama_model_quantize_default_params()
    how.ftype, how.nthread, how.output_tensor_type, how.token_embedding_type = FTYPES[form], 1, BF16, BF16
    if lib.llama_model_quantize(str(whole).encode(), str(out).encode(), ctypes.byref(how)):
        raise SystemExit(f"llama.cpp did not quantize {whole} to {form}")
    whole.unlink()
    return out


class LlamaCpp:
    """A file in llama.cpp: prompts and greedy steps of one sequence."""

    def __init__(self, folder: Path, file: Path, threads: int, room: int) -> None:
        self.lib = lib = library(folder)
        model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        how = lib.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_ubatch, how.n_threads, how.n_threads_batch = room, BATCH, PASS, threads, threads
        how.flash_attn_type = AUTO
        self.context = lib.llama_init_from_model(model, how)
        if not self.context:
            raise SystemExit(f"llama.cpp does not load {file}")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.bytes = lib.llama_model_size(model)

    def start(self, prompts: list[list[int]], *_: object) -> int:
        """Read one prompt into an empty cache; returns the next token."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        return self._read(prompts[0])

    def step(self) -> int:
        """Read the newest token; returns the next one."""
        return self._read([self.token])

    def logits(self) -> torch.Tensor:
        """Those after the last token that was read, (V,)."""
        values = ctypes.POINTER(ctypes.c_float * self.vocabulary)
        of_token = ctypes.cast(self.lib.llama_get_logits_ith(self.context, -1), values)
        return torch.frombuffer(of_token.contents, dtype=torch.float32)

    def _read(self, ids: list[int]) -> int:
        tokens = (self.lib.llama_token * len(ids))(*ids)
        if failed := self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit(f"llama_decode: {failed}")
        self.token = int(self.logits().argmax())
        return self.token
