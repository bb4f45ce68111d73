// The codes of packed words as bytes that a dot product takes.
#pragma once
#include <cstdint>

#include "round.h"

namespace {

// The codes of quad q, times 2^scaled(BITS, U, q): where the dot product takes any unsigned byte, a code that stands high in
// its byte is multiplied as it stands, and the sum of such is shifted once a block.
constexpr int scaled(int bits, int U, int q) { return Isa::ANY_BYTE && bits < 8 && bits != 3 ? q % (8 / bits) % U * bits : 0; }

template <int BITS, int U>
inline Isa::I codes(const int32_t* p, int q) {
    if constexpr (BITS == 8) return Isa::eight(Isa::load(p + q * ROWS));
    if constexpr (BITS == 3) {
        Isa::I high = Isa::load(p + 2 * ROWS);
        high = q < 2 ? Isa::left(high, 2 - q) : Isa::right(high, q - 2);
        return Isa::merged(Isa::right(Isa::load(p + q / 4 * ROWS), q % 4 * 2), high);
    }
    if constexpr (BITS < 8 && BITS != 3) {
        constexpr int per_byte = 8 / BITS;
        const int stays = scaled(BITS, U, q), mask = ((1 << BITS) - 1) * 0x01010101;
        return Isa::masked(Isa::right(Isa::load(p + q / per_byte * ROWS), q % per_byte * BITS - stays),
                           (int)((unsigned)mask << stays));
    }
}

}  // namespace
