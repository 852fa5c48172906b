#include "checksum.h"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace saria {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words of the checksum are little-endian");

constexpr size_t kWords = kBlockBytes / sizeof(uint64_t);

struct Keys {
    alignas(64) uint64_t words[kWords];
    constexpr Keys() : words{} {
        uint64_t state = 0x5A71A5A71A5A71A5u;
        for (uint64_t &word : words) {
            state += 0x9E3779B97F4A7C15u;
            uint64_t x = state;
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
            x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
            word = x ^ (x >> 31);
        }
    }
};
constexpr Keys kKeys;

// Each sum, with Copy, also copies the block to `copy`, aligned to 64 bytes, past the caches: a pass of its own over the
// block would wait for memory that a plain copy does not touch.

template <bool Copy> uint64_t sum_portable(const uint8_t *block, uint8_t *copy) {
    if (Copy) std::memcpy(copy, block, kBlockBytes);
    uint64_t sum = 0;
    for (size_t i = 0; i < kWords; ++i) {
        uint64_t w, k = kKeys.words[i];
        std::memcpy(&w, block + i * 8, 8);
        uint32_t lo = static_cast<uint32_t>(w) + static_cast<uint32_t>(k);
        uint32_t hi = static_cast<uint32_t>(w >> 32) + static_cast<uint32_t>(k >> 32);
        sum += static_cast<uint64_t>(lo) * hi + ((w << 32) | (w >> 32));
    }
    return sum;
}

#if defined(__x86_64__)
// Shuffle 0xB1 swaps the 32-bit halves of each word: it is the rotation, and brings hi32 under the multiplier.

template <bool Copy> __attribute__((target("avx2"))) uint64_t sum_avx2(const uint8_t *block, uint8_t *copy) {
    __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t i = 0; i < kWords; i += 8) {
        for (size_t half = 0; half < 2; ++half) {
            size_t at = i + half * 4;
            __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + at * 8));
            if (Copy) _mm256_stream_si256(reinterpret_cast<__m256i *>(copy + at * 8), w);
            __m256i x = _mm256_add_epi32(w, *reinterpret_cast<const __m256i *>(kKeys.words + at));
            __m256i product = _mm256_mul_epu32(x, _mm256_shuffle_epi32(x, 0xB1));
            __m256i term = _mm256_add_epi64(product, _mm256_shuffle_epi32(w, 0xB1));
            sum[half] = _mm256_add_epi64(sum[half], term);
        }
    }
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), _mm256_add_epi64(sum[0], sum[1]));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

template <bool Copy> __attribute__((target("avx512f"))) uint64_t sum_avx512(const uint8_t *block, uint8_t *copy) {
    const auto swap = static_cast<_MM_PERM_ENUM>(0xB1);
    __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (size_t i = 0; i < kWords; i += 16) {
        for (size_t half = 0; half < 2; ++half) {
            size_t at = i + half * 8;
            __m512i w = _mm512_loadu_si512(block + at * 8);
            if (Copy) _mm512_stream_si512(reinterpret_cast<__m512i *>(copy + at * 8), w);
            __m512i x = _mm512_add_epi32(w, _mm512_load_si512(kKeys.words + at));
            __m512i product = _mm512_mul_epu32(x, _mm512_shuffle_epi32(x, swap));
            __m512i term = _mm512_add_epi64(product, _mm512_shuffle_epi32(w, swap));
            sum[half] = _mm512_add_epi64(sum[half], term);
        }
    }
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, _mm512_add_epi64(sum[0], sum[1]));
    uint64_t total = 0;
    for (uint64_t lane : lanes) total += lane;
    return total;
}
#endif

using BlockSum = uint64_t (*)(const uint8_t *, uint8_t *);

struct Implementation {
    BlockSum sum, sum_and_copy;
};

std::vector<Implementation> implementations() {  // the fastest last
    std::vector<Implementation> usable{{sum_portable<false>, sum_portable<true>}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) usable.push_back({sum_avx2<false>, sum_avx2<true>});
    if (__builtin_cpu_supports("avx512f")) usable.push_back({sum_avx512<false>, sum_avx512<true>});
#endif
    return usable;
}

const Implementation kFastest = implementations().back();

}  // namespace

uint64_t block_sum(const uint8_t *block) { return kFastest.sum(block, nullptr); }

uint64_t block_sum_and_copy(const uint8_t *block, uint8_t *copy) { return kFastest.sum_and_copy(block, copy); }

void finish_copies() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

std::vector<uint64_t> block_sum_by_all(const uint8_t *block) {
    alignas(64) uint8_t copy[kBlockBytes];
    std::vector<uint64_t> sums;
    for (const Implementation &one : implementations()) {
        sums.push_back(one.sum(block, nullptr));
        std::memset(copy, 0, kBlockBytes);
        uint64_t sum = one.sum_and_copy(block, copy);
        finish_copies();
        sums.push_back(std::memcmp(copy, block, kBlockBytes) == 0 ? sum : ~sum);
    }
    return sums;
}

}  // namespace saria
