// Runs one kernel instance (macros SOURCE, KERNEL, ARGUMENTS, THREADS) over files in argv[1]: w, s, z, b, x -> y.
#include SOURCE

static std::vector<char> read(const std::string& path) {
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) exit(2);
    fseek(f, 0, SEEK_END);
    std::vector<char> v(ftell(f) + 64);
    rewind(f);
    if (fread(v.data(), 1, v.size() - 64, f) != v.size() - 64) exit(2);
    fclose(f);
    return v;
}
static std::vector<char> W, S, Z, B, X, Y;
static int P[16];
static const u32* words() { return (const u32*)W.data(); }
static const u16* halves(const std::vector<char>& v) { return (const u16*)v.data(); }
static u16* y() { return (u16*)Y.data(); }
static void entry() {
    KERNEL(ARGUMENTS);
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

// folder, lazy, backwards, grid x, grid y, bytes of y, then the kernel's integers
int main(int argc, char** argv) {
    const std::string folder = argv[1];
    W = read(folder + "/w"), S = read(folder + "/s"), Z = read(folder + "/z"), B = read(folder + "/b"), X = read(folder + "/x");
    lazy = atoi(argv[2]);
    const bool backwards = atoi(argv[3]);
    gridDim = {atoi(argv[4]), atoi(argv[5])};
    Y.assign(atoi(argv[6]), (char)0xff);
    for (int i = 7; i < argc; i++) P[i - 7] = atoi(argv[i]);
    std::vector<std::vector<char>> stacks(THREADS, std::vector<char>(64 << 10));
    for (int block = 0; block < gridDim.x * gridDim.y; block++) {
        blockIdx = {block % gridDim.x, block / gridDim.x};
        memset(arena, 0xff, sizeof arena);
        fibers.assign(THREADS, Fiber());
        for (Gate& g : warp_gates) g = Gate();
        block_gate = Gate();
        for (int i = 0; i < THREADS; i++) {
            Fiber& f = fibers[i];
            f.index = {i, 0};
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = stacks[i].data(), f.context.uc_stack.ss_size = stacks[i].size(), f.context.uc_link = &scheduler;
            makecontext(&f.context, entry, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (int i = 0; i < THREADS; i++) {
                current = backwards ? THREADS - 1 - i : i;
                if (!fibers[current].done) any = true, swapcontext(&scheduler, &fibers[current].context);
            }
        }
    }
    FILE* f = fopen((folder + "/y").c_str(), "wb");
    if (fwrite(Y.data(), 1, Y.size(), f) != Y.size()) return 2;
    return fclose(f);
}
