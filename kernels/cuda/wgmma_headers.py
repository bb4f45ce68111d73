"""Generated headers of Hopper's wgmma instructions: inline PTX must name every accumulator register, up to 128 of them.

Each struct's `run(d, a, b)` is one instruction, d[NB / 2] += a (64 rows of W, k by kind) times b (NB columns, a descriptor of
shared memory); `first` is the same with = for +=. Where `add` is an argument, it says at run time whether d is added to.

  wgmma.cuh      Wgmma<T, NB>        a (64 x 16) fp16 (T 0) or bf16 (T 1) in registers, fp32 sums
  wgmma_turned.cuh  WgmmaTurned<T, NB>   the same, b's rows being k: its NB columns lie side by side in memory
  wgmma8.cuh     Wgmma8<INT8, NB>    a (64 x 32) e4m3 in registers with fp32 sums, or u8 (b: s8) with int32 sums
  wgmma_fp8.cuh  WgmmaFp8<NB>        a (64 x 32) e4m3, a descriptor like b, fp32 sums
"""

COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)
COLUMNS_TURNED = (64, 128)
COLUMNS8 = (8, 16, 24, 32, 64, 96, 128)
COLUMNS_FP8 = (8, 16, 32, 64, 128, 192)


def wgmma_headers() -> dict[str, str]:
    """Header name -> its text."""
    half = "".join(
        _struct(f"Wgmma<{T}, {nb}>", f"m64n{nb}k16.f32.{t}.{t}", nb, "float", ", 1, 1, 0", in_registers=True, run_adds=True)
        for T, t in enumerate(("f16", "bf16"))
        for nb in COLUMNS
    )
    turned = "".join(
        _struct(
            f"WgmmaTurned<{T}, {nb}>", f"m64n{nb}k16.f32.{t}.{t}", nb, "float", ", 1, 1, 1", in_registers=True, run_adds=True
        )
        for T, t in enumerate(("f16", "bf16"))
        for nb in COLUMNS_TURNED
    )
    eight = "".join(
        _struct(f"Wgmma8<{flag}, {nb}>", f"m64n{nb}k32.{kind}", nb, c, tail, in_registers=True, run_adds=False)
        for flag, kind, c, tail in (("false", "f32.e4m3.e4m3", "float", ", 1, 1"), ("true", "s32.u8.s8", "int", ""))
        for nb in COLUMNS8
    )
    fp8 = "".join(
        _struct(f"WgmmaFp8<{nb}>", f"m64n{nb}k32.f32.e4m3.e4m3", nb, "float", ", 1, 1", in_registers=False, run_adds=False)
        for nb in COLUMNS_FP8
    )
    return {
        "wgmma.cuh": f"#pragma once\ntemplate <int T, int NB> struct Wgmma;\n{half}",
        "wgmma_turned.cuh": f"#pragma once\ntemplate <int T, int NB> struct WgmmaTurned;\n{turned}",
        "wgmma8.cuh": f"#pragma once\ntemplate <bool INT8, int NB> struct Wgmma8;\n{eight}",
        "wgmma_fp8.cuh": f"#pragma once\ntemplate <int NB> struct WgmmaFp8;\n{fp8}",
    }


def _struct(name: str, kind: str, nb: int, c: str, tail: str, *, in_registers: bool, run_adds: bool) -> str:
    """One specialisation. run_adds: `run` always adds; else its last argument says whether."""
    n, letter = nb // 2, "f" if c == "float" else "r"
    operands = 4 if in_registers else 1  # of a
    d, a = ", ".join(f"%{i}" for i in range(n)), ", ".join(f"%{n + i}" for i in range(operands))
    a_text = f"{{{a}}}" if in_registers else a
    inputs = ", ".join([*(f'"r"(a[{i}])' for i in range(4)), '"l"(b)']) if in_registers else '"l"(a), "l"(b)'
    product = f"wgmma.mma_async.sync.aligned.{kind} {{{d}}}, {a_text}, %{n + operands}, "
    flag = n + operands + 1
    by_flag = f"{{.reg .pred add; setp.ne.s32 add, %{flag}, 0; {product}add{tail};}}"
    a_type = "const unsigned (&a)[4]" if in_registers else "unsigned long long a"
    functions = [("run", f"{product}1{tail};", "+", "", "")] if run_adds else [("run", by_flag, "+", ", int add", ', "r"(add)')]
    functions += [("first", f"{product}0{tail};", "=", "", "")] if in_registers else []
    lines = [f"template <> struct {name} {{"]
    for function, text, modifier, more, last in functions:
        outputs = ", ".join(f'"{modifier}{letter}"(d[{i}])' for i in range(n))
        lines.append(
            f"static __device__ __forceinline__ void {function}({c} (&d)[{n}], {a_type}, unsigned long long b{more}) "
            f'{{ asm volatile("{text}" : {outputs} : {inputs}{last}); }}'
        )
    return "\n".join([*lines, "};", ""])
