// 2^v in one instruction, as softmax takes it: within 2 ulp, subnormal results are 0.
#pragma once

__device__ __forceinline__ float exp2_of(float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
    return e;
}
