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

PUBLIC void lowq_cpu_product(int set, const Args* a) { SETS[set].run(*a); }

// what: args.h's ADD_NORM with a Norm, and so on.
PUBLIC void lowq_cpu_step(int set, int what, int dtype, const void* a) { SETS[set].step(what, dtype, a); }
}
