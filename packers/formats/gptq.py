"""GPTQ: qweight (K*bits/32, N) int32, packed along K; qzeros (G, N*bits/32), packed along N; scales (G, N); g_idx (K).

w[k, n] = scales[g_idx[k], n] * (q - z). Version 1 (`checkpoint_format` "gptq", or none) stores z - 1, version 2 ("gptq_v2")
stores z. qweight is the transpose of lowq's words, 3 bits included: a dense bit stream, 32 codes in 3 words.

Traps: version 1's writers subtract 1 from all zeros of a word in one 32-bit subtraction. A zero of 0 then borrows from the next
field, and only an addition to the whole word restores both (3-bit fields, which straddle words, are restored one by one).
`desc_act` checkpoints have a g_idx whose groups are not consecutive. They, and matrices with a shorter last group, are read as
dense matrices. Symmetric files exist with the zeros of either version, whatever their config says; both mean 2**(bits-1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowq_packers import bitstream
from lowq_packers.errors import DamagedError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, Tensors, method, register
from lowq_packers.formats import _common as c
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

WIDTHS = (8, 4, 3, 2)
SHORT = ", short last group"
PER_MODULE = ("bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act")
ABSENT = ("rotation", "adapter", "is_marlin_format")  # such files are refused
USED = ("quant_method", "checkpoint_format", "format", "pack_dtype", "data_type", "dynamic", *ABSENT)
HARMLESS = (  # settings of the quantizer or of other engines that change no weight
    *("meta", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "act_group_aware", "method"),
    *("model_name_or_path", "model_file_base_name", "modules_in_block_to_quantize", "block_name_to_quantize", "lm_head"),
    *("module_name_preceding_first_block", "batch_size", "pad_token_id", "cache_block_outputs", "tokenizer", "dataset"),
    *("backend", "use_cuda_fp16", "model_seqlen", "max_input_length", "use_exllama", "disable_exllama", "exllama_config"),
    *("quantizer", "inside_layer_modules", "parallel_packing", "device", "hyb_act", "version", "v2", "quant_path", "task"),
    *("amp", "autoround_version", "provider", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "gradient_accumulate_steps"),
    *("low_gpu_mem_usage", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input"),  # AutoRound
)


def _claims(config: Config, headers: Headers) -> bool:
    declared = method(config)
    return declared == "gptq" or (
        declared is None and any(n.endswith(".qweight") for n in headers) and any(n.endswith(".g_idx") for n in headers)
    )


def _version(q: Mapping[str, Any]) -> int:
    """The version, 1 or 2. Raises UnsupportedError for layouts of particular kernels."""
    fmt = q.get("checkpoint_format") or q.get("format") or "gptq"
    if fmt not in ("gptq", "gptq_v2"):
        raise c.refusal(q, "checkpoint_format" if q.get("checkpoint_format") else "format", reads="gptq and gptq_v2")
    return 2 if fmt == "gptq_v2" else 1


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization_config")
    c.check_fields(q, (*USED, *PER_MODULE), HARMLESS)
    c.check_absent(q, *ABSENT)
    if q.get("data_type", "int") != "int":
        raise c.refusal(q, "data_type", reads="int")
    if q.get("pack_dtype", "int32") != "int32":
        raise c.refusal(q, "pack_dtype", reads="int32")
    version, rules = _version(q), c.dynamic_rules(q, PER_MODULE, HARMLESS)
    return [_matrix(p, c.overridden(q, rules, p), version, headers, fetch) for p in c.modules(headers, ".qweight")]


def _groups(K: int, group_size: int, p: str) -> tuple[int, int]:
    """`c.group_count`, but also for a group size that does not divide K: the last group is then shorter."""
    if group_size < 1 or K % group_size == 0:
        return c.group_count(K, group_size, p)
    return min(group_size, K), -(-K // group_size)


def _zeros(words: torch.Tensor, bits: int, N: int, version: int) -> torch.Tensor:
    """(G, N) zeros, from the words of a version."""
    if version == 1 and 32 % bits == 0:
        words = words + sum(1 << at for at in range(0, 32, bits))  # int32 wraps around, as in the writer
    zeros = bitstream.unpack(words.contiguous(), bits, N)
    return (zeros + 1) & ((1 << bits) - 1) if version == 1 and 32 % bits else zeros


def _is_of_other_version(words: torch.Tensor, bits: int, N: int, version: int) -> bool:
    """Whether all zeros are those of symmetric codes in the storage of the other version."""
    return bool((_zeros(words, bits, N, 3 - version) == 1 << (bits - 1)).all())


def _checked(p: str, words: torch.Tensor, bits: int, N: int, version: int, sym: bool) -> torch.Tensor:
    """(G, N) zeros of a matrix. Raises DamagedError if they contradict the config."""
    zeros, mid = _zeros(words, bits, N, version), 1 << (bits - 1)
    if _is_of_other_version(words, bits, N, version):
        if sym:
            return torch.full_like(zeros, mid)
        raise DamagedError(
            f"{p} has symmetric zeros as version {3 - version} stores them, but quantization_config says version {version} and "
            f"sym=false; set checkpoint_format to {'gptq_v2' if version == 1 else 'gptq'} there"
        )
    if sym and not bool((zeros == mid).all()):
        raise DamagedError(
            f"{p} has zeros other than {mid}, but its config says sym; where the model is asymmetric, set sym to false there"
        )
    return zeros


def _matrix(p: str, q: Mapping[str, Any], version: int, headers: Headers, fetch: Fetch | None) -> Matrix:
    bits = c.number(q, "bits", "w_bit")
    if not 2 <= bits <= 8 or bits in (5, 6, 7):
        raise c.refusal(q, "bits", "w_bit", reads="2, 3, 4 and 8", module=p)
    rows, N = c.matrix(headers, f"{p}.qweight", ("I32",))
    index = headers.get(f"{p}.g_idx")
    K = index.shape[0] if index and index.shape else rows * 32 // bits  # the last word may be partly filled
    if bitstream.words_per_row(K, bits) != rows or not K:
        raise DamagedError(f"{p}.qweight has {rows} words per column; {K} codes of {bits} bits need another number")
    g, G = _groups(K, c.number(q, "group_size", "q_group_size"), p)
    c.need(headers, f"{p}.qzeros", (G, bitstream.words_per_row(N, bits)), ("I32",))
    dtype = c.need(headers, f"{p}.scales", (G, N)).dtype
    sym = c.flag(q, "sym", False)
    parts = [f"{p}.qweight", f"{p}.qzeros", f"{p}.scales"]
    permuted = c.flag(q, "desc_act", False)
    if index:
        c.need(headers, f"{p}.g_idx", (K,), ("I32", "I64"))
        parts.append(f"{p}.g_idx")
        if fetch is not None:
            declared, permuted = permuted, not torch.equal(fetch(f"{p}.g_idx").long(), torch.arange(K) // g)
            if permuted and not declared:
                raise DamagedError(f"{p}.g_idx permutes groups, but quantization_config says desc_act=false; set it to true")
    dense = permuted or K % g != 0
    scheme = None if dense else c.held(bits, g, "none" if sym else "int", K)
    coding = bits, N, version

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        codes = bitstream.unpack(fetch(f"{p}.qweight").t().contiguous(), bits, K)
        scales, zeros = fetch(f"{p}.scales").t().contiguous(), _checked(p, fetch(f"{p}.qzeros"), *coding, sym).t().contiguous()
        if dense:
            index = fetch(f"{p}.g_idx").long() if f"{p}.g_idx" in headers else torch.arange(K) // g
            if int(index.min()) < 0 or int(index.max()) >= G:
                raise DamagedError(f"{p}.g_idx names group {int(index.max())}; there are {G}")
            return ((codes.float() - zeros[:, index].float()) * scales[:, index].float()).to(scales.dtype)
        return c.decoded(codes, scales, None if sym else zeros.to(scales.dtype), bits, g, "none" if sym else "int")

    def check(fetch: Fetch) -> list[str]:
        words = fetch(f"{p}.qzeros")
        if sym and _is_of_other_version(words, *coding):
            return [f"{p}: zeros as version {3 - version} stores them; read as {1 << (bits - 1)}, since the config says sym"]
        if version == 1 and bool((_zeros(words, bits, N, 1) == 0).any()):
            return [f"{p}: version-1 zeros of 0, which change their neighbours in engines that add 1 to each field alone"]
        return []

    stored = f"{bits}-bit g{g} {'sym' if sym else 'int zero'}" + (" act-order" if permuted else "") + (SHORT if K % g else "")
    return Matrix(p, (N, K), tuple(parts), read, stored, bits, scheme, dtype, check)


def _notes(config: Config, headers: Headers) -> list[str]:
    q = c.section(config, "quantization_config")
    notes = [f"zeros are stored {'as they are (version 2)' if _version(q) == 2 else 'less one (version 1)'}"]
    if q.get("desc_act"):
        notes.append("desc_act: groups are permuted along K; read as dense matrices, and slow or refused in several engines")
    return notes


def _engines(config: Config, matrices: Sequence[Matrix]) -> list[str]:
    q = c.section(config, "quantization_config")
    engines = ["lowq", "GPTQModel", "transformers (with gptqmodel)"]
    if q.get("sym") and all(m.bits in (4, 8) and SHORT not in m.stored for m in matrices):
        engines += ["vLLM", "SGLang"]
    return engines


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    if s.bits not in WIDTHS:
        return f"GPTQ holds 8, 4, 3 and 2 bits, not {s.bits}; nearest: --bits 2"
    if s.zero == "float":
        return "GPTQ holds whole-number zeros; nearest: quantize with --zero int (or none, which vLLM serves)"
    if N * s.bits % 32 or K * s.bits % 32:
        return f"GPTQ fills whole words along N={N} and along K={K}, which {s.bits} bits do not; nearest: compressed-tensors"
    return None


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    main = c.schemes_agree(schemes) or Scheme(4, 128, "int")
    sym = all(s.zero == "none" for s in schemes.values())

    def group(s: Scheme, name: str | None) -> int:
        whole = [n for n in ([name] if name else [n for n, t in schemes.items() if t == main]) if s.group_size == shapes[n][1]]
        return -1 if whole else s.group_size

    q: dict[str, Any] = {
        "quant_method": "gptq", "bits": main.bits, "group_size": group(main, None), "sym": sym, "desc_act": False,
        "lm_head": "lm_head" in schemes, "checkpoint_format": "gptq" if sym else "gptq_v2", "pack_dtype": "int32",
    }  # fmt: skip
    dynamic: dict[str, Any] = {f"-:{c.exactly(n)}": {} for n in dense_names if n != "lm_head"}
    for name, s in schemes.items():
        if (s.bits, group(s, name)) != (main.bits, q["group_size"]):
            dynamic[f"+:{c.exactly(name)}"] = {"bits": s.bits, "group_size": group(s, name)}
    if dynamic:
        q["dynamic"] = dynamic
    return {"quantization_config": q}


def _write(name: str, q: QuantizedTensor, config: Config) -> Tensors:
    settings = c.section(config, "quantization_config")
    zeros = c.whole_zeros(q, name).t().contiguous()  # (G, N)
    if _version(settings) == 1:
        zeros = zeros - 1  # version 1 is written only for symmetric checkpoints, with z >= 1
    K = q.shape[1]
    return {
        f"{name}.qweight": bitstream.pack(q.W_q, q.bits).t().contiguous(),
        f"{name}.qzeros": bitstream.pack(zeros, q.bits),
        f"{name}.scales": q.scales.t().contiguous(),
        f"{name}.g_idx": torch.arange(K, dtype=torch.int32) // q.group_size,
    }


EXPORT = Export(
    2,
    other_files=lambda section: {"quantize_config.json": section["quantization_config"]},
    towers=lambda config: "vLLM, GPTQModel and transformers look for packed weights of GPTQ in the text model only",
)
register(Format("gptq", "GPTQ", _matrices, _engines, _why_not, _write, _config, _notes, export=EXPORT, claims=_claims))
