// Activations of MLPs, gated or not: the functions of decode/activation.py, in fp32 from `dtype`, rounded once to it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "args.h"
#include "dense.h"

namespace {

// e^x within 2 ulp, in operations that the compiler makes vectors of; 0 below -87, infinite above 88.
inline float exponential(float x) {
    float clamped = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
    float n = __builtin_rintf(clamped * 1.44269504f), r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f, p = p * r * r + r + 1;
    uint32_t u = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &u, 4);
    return x < -87.f ? 0 : x > 88.f ? INFINITY : x != x ? x : p * scale;
}

constexpr float LIMIT = 7, STEEPNESS = 1.702f;  // of CLAMPED

constexpr int AT_ONCE = 256;  // values at once

// e^x goes through memory: g++ otherwise makes branches of its limits, and one value at a time takes 5 times as long.
__attribute__((noinline)) void exponentials(float* x, int n) {
    for (int i = 0; i < n; i++) x[i] = exponential(x[i]);
}

// x times the normal distribution's integral up to x, that within 1.5e-7 of e^(-x^2 / 2) (Abramowitz and Stegun 7.1.26).
inline void gelu(float* x, int n) {
    float power[AT_ONCE];
    for (int i = 0; i < n; i++) power[i] = -0.5f * x[i] * x[i];
    exponentials(power, n);
    for (int i = 0; i < n; i++) {
        const float t = 1 / (1 + 0.3275911f * 0.70710678f * std::fabs(x[i]));
        const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
        const float tail = 0.5f * p * power[i], left = x[i] < 0 ? 1 : 0;
        x[i] *= left * tail + (1 - left) * (1 - tail);
    }
}

// x <- act(x), or of CLAMPED act(x) with up <- the factor that belongs to it; n is at most AT_ONCE.
inline void activate(int act, float* x, float* up, int n) {
    float e[AT_ONCE];
    switch (act) {
        case SILU:
            for (int i = 0; i < n; i++) e[i] = -x[i];
            exponentials(e, n);
            for (int i = 0; i < n; i++) x[i] /= 1 + e[i];
            break;
        case GELU_TANH:  // by tanh(u) = 1 - 2 / (e^2u + 1)
            for (int i = 0; i < n; i++) e[i] = 1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
            exponentials(e, n);
            for (int i = 0; i < n; i++) x[i] *= 1 - 1 / (e[i] + 1);
            break;
        case GELU:
            gelu(x, n);
            break;
        case RELU:
            for (int i = 0; i < n; i++) x[i] = x[i] < 0 ? 0 : x[i];
            break;
        case RELU2:
            for (int i = 0; i < n; i++) x[i] = x[i] < 0 ? 0 : x[i] * x[i];
            break;
        default:
            for (int i = 0; i < n; i++) {
                const float least = up[i] < -LIMIT ? -LIMIT : up[i];
                up[i] = (least > LIMIT ? LIMIT : least) + 1;
            }
            for (int i = 0; i < n; i++) x[i] = x[i] > LIMIT ? LIMIT : x[i], e[i] = -STEEPNESS * x[i];
            exponentials(e, n);
            for (int i = 0; i < n; i++) x[i] /= 1 + e[i];
    }
}

template <int T>
void gated(const Gated& a) {
    const int parts = (a.I + AT_ONCE - 1) / AT_ONCE;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.M > 1)
    for (long i = 0; i < (long)a.M * parts; i++) {
        const size_t m = i / parts, first = i % parts * AT_ONCE, at = m * (a.alone ? 1 : 2) * a.I + first;
        const int n = a.I - (int)first < AT_ONCE ? a.I - (int)first : AT_ONCE;
        float gate[AT_ONCE], up[AT_ONCE];
        widen<T>(gate, a.x, at, n);
        if (a.scale != 1)
            for (int j = 0; j < n; j++) gate[j] *= a.scale;
        const bool times = !a.alone || a.by;
        if (times) a.alone ? widen<T>(up, a.by, m * a.apart + first, n) : widen<T>(up, a.x, at + a.I, n);
        activate(a.act, gate, up, n);
        if (times)
            for (int j = 0; j < n; j++) gate[j] *= up[j];
        round_to<T>(a.y, m * a.I + first, gate, n);
    }
}

}  // namespace
