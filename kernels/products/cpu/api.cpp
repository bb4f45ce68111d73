// The C ABI: which instruction sets this CPU has, a product with one of them, and what lies between products.
#include "args.h"

struct Set {
    const char* name;
    bool (*has)();
    void (*run)(const Args&);
    void (*step)(int what, int dtype, const void* args);
};

#if defined(__aarch64__)
#include <sys/auxv.h>
void product_neon(const Args&);
void step_neon(int, int, const void*);
static bool has_neon() {
#ifdef __linux__
    return getauxval(AT_HWCAP) & (1 << 20);  // ASIMDDP
#else
    return true;
#endif
}
static const Set SETS[] = {{"neon", has_neon, product_neon, step_neon}};
#else
void product_avx512(const Args&);
void product_avx2(const Args&);
void step_avx512(int, int, const void*);
void step_avx2(int, int, const void*);
bool has_avx512();
bool has_avx2();
static const Set SETS[] = {{"avx512", has_avx512, product_avx512, step_avx512}, {"avx2", has_avx2, product_avx2, step_avx2}};
#endif
constexpr int COUNT = sizeof(SETS) / sizeof(SETS[0]);

#define PUBLIC __attribute__((visibility("default")))
extern "C" {
// The name of instruction set i, best first, or null past the last; `here` says whether this CPU has it.
PUBLIC const char* lowq_cpu_set(int i, int* here) {
    if (i >= COUNT) return nullptr;
    *here = SETS[i].has();
    return SETS[i].name;
}

// One call, or those of a whole step, one after the other.
PUBLIC void lowq_cpu_run(int set, const Call* calls, int count) {
    for (const Call* c = calls; c < calls + count; c++)
        c->what == PRODUCT ? SETS[set].run(*(const Args*)c->args) : SETS[set].step(c->what, c->dtype, c->args);
}
}
