// NEON with the dot product of bytes (ARMv8.2 dotprod: every Apple, Graviton and Ampere since 2019): a quarter tile a register.
#include <arm_neon.h>
#include <stddef.h>

#include "args.h"

namespace {
struct Isa {
    using I = int32x4_t;
    using F = float32x4_t;
    static constexpr int LANES = 4, OFFSET = 128, TOGETHER = 4;
    static constexpr bool JOINED = false;  // digits' sums of a block
    static constexpr bool AT_ONCE = false;
    static constexpr bool ANY_BYTE = false;  // of codes in `dot`, which are signed
    static constexpr bool pairs(int, int, int) { return false; }  // of 16-bit integers: bytes are multiplied
    static I load(const void* p) { return vld1q_s32((const int32_t*)p); }
    static I none() { return vdupq_n_s32(0); }
    static I eight(I v) { return veorq_s32(v, vreinterpretq_s32_u8(vdupq_n_u8(0x80))); }
    static I half(I quad, int) { return quad; }
    static I right(I v, int n) { return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(v), vdupq_n_s32(-n))); }
    static I left(I v, int n) { return vshlq_s32(v, vdupq_n_s32(n)); }
    static I down(I v, int) { return v; }
    static I masked(I v, int m) { return vandq_s32(v, vdupq_n_s32(m)); }
    static I merged(I low, I high) { return vorrq_s32(masked(low, 0x03030303), masked(high, 0x04040404)); }
    static I add(I a, I b) { return vaddq_s32(a, b); }
    static I quad(const void* x) { return vld1q_dup_s32((const int32_t*)x); }
    template <int BITS>
    static I begin(I sum) { return sum; }
    template <int BITS>
    static I end(I, I part, int = 0) { return part; }
    template <int BITS>
    static I dot(I sum, I codes, I digits) {
        return vdotq_s32(sum, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(digits));
    }
    template <int BITS>
    static I dot_at(I sum, I codes, const void* x) { return dot<BITS>(sum, codes, quad(x)); }
    // Entries of a table are 16-bit integers: those of one register of codes fill two, the first two rows and the last two.
    struct Entries { int16x8_t first, second; };
    struct Sums { I row[4]; };
    static I bytes(const void* p) { return vld1q_s32((const int32_t*)p); }
    static Entries look_up(I codes, I low, I high) {
        const uint8x16_t at = vreinterpretq_u8_s32(codes);
        const int8x16_t l = vqtbl1q_s8(vreinterpretq_s8_s32(low), at), h = vqtbl1q_s8(vreinterpretq_s8_s32(high), at);
        return {vreinterpretq_s16_s8(vzip1q_s8(l, h)), vreinterpretq_s16_s8(vzip2q_s8(l, h))};
    }
    static Sums no_sums() { return {{none(), none(), none(), none()}}; }
    static Sums plus(Sums s, Entries v, const int16_t* x) {
        const int16x4_t quad = vld1_s16(x);
        return {{vmlal_s16(s.row[0], vget_low_s16(v.first), quad), vmlal_s16(s.row[1], vget_high_s16(v.first), quad),
                 vmlal_s16(s.row[2], vget_low_s16(v.second), quad), vmlal_s16(s.row[3], vget_high_s16(v.second), quad)}};
    }
    static I total(Sums s) { return vpaddq_s32(vpaddq_s32(s.row[0], s.row[1]), vpaddq_s32(s.row[2], s.row[3])); }
    static bool bf16_dense(const Args&) { return false; }
    static F zero() { return vdupq_n_f32(0); }
    static F all(float f) { return vdupq_n_f32(f); }
    static F to_float(I v) { return vcvtq_f32_s32(v); }
    static F minus(F a, F b) { return vsubq_f32(a, b); }
    static F times(F a, F b) { return vmulq_f32(a, b); }
    static F plus_product(F sum, F a, F b) { return vfmaq_f32(sum, a, b); }
    static F minus_product(F sum, F a, F b) { return vfmsq_f32(sum, a, b); }
    static void store(float* p, F v) { vst1q_f32(p, v); }
    static float total(F v) { return vaddvq_f32(v); }
    // Bytes as integers.
    static uint8x8_t four_bytes(const void* p) {
        uint32_t four;
        __builtin_memcpy(&four, p, 4);
        return vreinterpret_u8_u32(vdup_n_u32(four));
    }
    static I widened(const void* p, bool) {
        return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))));
    }
    static I widened_signed(const void* p) {
        return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p)))));
    }
    static F meta(const void* p, int dtype, size_t at) {
        if (dtype == 2) return vld1q_f32((const float*)p + at);
        if (dtype > 2) {
            const uint16x4_t v = vget_low_u16(vmovl_u8(four_bytes((const uint8_t*)p + at)));
            const uint16x4_t sign = vshl_n_u16(vand_u16(v, vdup_n_u16(0x80)), 8);
            const uint16x4_t e4m3 = vorr_u16(vshl_n_u16(vand_u16(v, vdup_n_u16(0x7f)), 7), sign);
            if (dtype == 3) return vcvt_f32_f16(vreinterpret_f16_u16(e4m3));
            return vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_u16(v), 23), vdupq_n_u32(1 << 22)));
        }
        uint16x4_t v = vld1_u16((const uint16_t*)p + at);
        return dtype == 1 ? vcvt_f32_f16(vreinterpret_f16_u16(v)) : vreinterpretq_f32_u32(vshll_n_u16(v, 16));
    }
};
}  // namespace

#include "latent.h"
#include "product.h"

void product_neon(const Args& a) { product(a); }
void step_neon(int what, int dtype, const void* a) { between(what, dtype, a); }
