// Products read from stdin, by the function MULTIPLY, their results to stdout: test_cpu_emulated.py runs this.
#include <cstdio>
#include <vector>

#include "args.h"

void MULTIPLY(const Args&);

static std::vector<char> blob() {
    int64_t size;
    if (fread(&size, 8, 1, stdin) != 1) return {};
    std::vector<char> bytes(size);
    if (size && fread(bytes.data(), 1, size, stdin) != (size_t)size) return {};
    return bytes;
}

int main() {
    for (;;) {
        std::vector<char> args = blob(), part[7];
        if (args.size() != sizeof(Args)) return args.empty() ? 0 : 1;
        Args a;
        __builtin_memcpy(&a, args.data(), sizeof a);
        for (auto& p : part) p = blob();
        auto at = [&](int i) { return part[i].empty() ? nullptr : part[i].data(); };
        a.x = at(0), a.words = (const int32_t*)at(1), a.scales = at(2), a.zeros = at(3), a.bias = at(4);
        a.table = (const float*)at(5), a.factor = (const float*)at(6);
        std::vector<char> y((size_t)a.M * a.N * (a.dtype == FP32 ? 4 : 2), 0x5a);
        a.y = y.data();
        MULTIPLY(a);
        fwrite(y.data(), 1, y.size(), stdout);
    }
}
