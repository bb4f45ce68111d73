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

// The normal distribution's integral up to x, within 1.5e-7 of e^(-x^2 / 2) (Abramowitz and Stegun 7.1.26).
inline float below(float x) {
    const float z = std::fabs(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z);
    const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const float tail = 0.5f * p * exponential(-z * z);
    return x < 0 ? tail : 1 - tail;
}

// to[i] <- act(x[i]) * by(i).
template <class By>
inline void activate(int act, const float* x, int n, float* to, By by) {
    switch (act) {
        case SILU:
            for (int i = 0; i < n; i++) to[i] = by(i) * (x[i] / (1 + exponential(-x[i])));
            break;
        case GELU_TANH:  // by tanh(u) = 1 - 2 / (e^2u + 1)
            for (int i = 0; i < n; i++) {
                const float g = x[i], u = 1.5957691216f * (g + 0.044715f * g * g * g);
                to[i] = by(i) * (g * (1 - 1 / (exponential(u) + 1)));
            }
            break;
        case GELU:
            for (int i = 0; i < n; i++) to[i] = by(i) * (x[i] * below(x[i]));
            break;
        case RELU:
            for (int i = 0; i < n; i++) to[i] = by(i) * (x[i] < 0 ? 0 : x[i]);
            break;
        case RELU2:
            for (int i = 0; i < n; i++) to[i] = by(i) * (x[i] < 0 ? 0 : x[i] * x[i]);
            break;
        default:
            for (int i = 0; i < n; i++) {
                const float g = x[i] > LIMIT ? LIMIT : x[i], u = by(i);
                to[i] = ((u < -LIMIT ? -LIMIT : u > LIMIT ? LIMIT : u) + 1) * (g / (1 + exponential(-STEEPNESS * g)));
            }
    }
}

template <int T>
void gated(const Gated& a) {
    constexpr int PART = 256;  // values at once
    const int parts = (a.I + PART - 1) / PART;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.M > 1)
    for (long i = 0; i < (long)a.M * parts; i++) {
        const size_t m = i / parts, first = i % parts * PART, at = m * (a.alone ? 1 : 2) * a.I + first;
        const int n = a.I - (int)first < PART ? a.I - (int)first : PART;
        float gate[PART], up[PART], y[PART];
        widen<T>(gate, a.x, at, n);
        if (a.scale != 1)
            for (int j = 0; j < n; j++) gate[j] *= a.scale;
        if (a.alone && !a.by) {
            activate(a.act, gate, n, y, [](int) { return 1.f; });
        } else {
            a.alone ? widen<T>(up, a.by, m * a.apart + first, n) : widen<T>(up, a.x, at + a.I, n);
            activate(a.act, gate, n, y, [&](int j) { return up[j]; });
        }
        round_to<T>(a.y, m * a.I + first, y, n);
    }
}

}  // namespace
