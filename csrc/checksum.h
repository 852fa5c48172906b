// The record checksum: part of the on-disk format, defined in docs/format.md and checksum.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace saria {

constexpr size_t kBlockBytes = 4096;
constexpr size_t kCopyAlignment = 64;

inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// s_j of the 4096 bytes at `block`, which need not be aligned.
uint64_t block_sum(const uint8_t *block);

// The same, and copies the block to `copy`, aligned to kCopyAlignment. Others see the copy after finish_copies().
uint64_t block_sum_and_copy(const uint8_t *block, uint8_t *copy);
void finish_copies();

// block_sum from every implementation that this CPU can run, without and with a copy; for tests.
std::vector<uint64_t> block_sum_by_all(const uint8_t *block);

// Running checksum: feed it the record's blocks in order.
class Checksum {
public:
    explicit Checksum(uint64_t seed) : step_(seed) {}

    void block(const uint8_t *data) { add(block_sum(data)); }

    void block_and_copy(const uint8_t *data, uint8_t *copy) { add(block_sum_and_copy(data, copy)); }

    uint64_t finish(size_t nbytes) const { return mix64(sum_ ^ nbytes); }

private:
    void add(uint64_t block_sum) {
        step_ += 0x9E3779B97F4A7C15u;
        sum_ += mix64(block_sum ^ mix64(step_));
    }

    uint64_t step_;
    uint64_t sum_ = 0;
};

inline uint64_t checksum(const uint8_t *record, size_t nbytes, uint64_t seed) {
    Checksum sum(seed);
    for (size_t at = 0; at < nbytes; at += kBlockBytes) sum.block(record + at);
    return sum.finish(nbytes);
}

}  // namespace saria
