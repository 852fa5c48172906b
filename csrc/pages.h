// Copies between a contiguous record and the pages of a KV cache group.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace saria {

using Blocks = std::vector<int64_t>;

// Where the pages of one KV cache group lie: page of block b in layer l is at bases[l] + b * strides[l].
class PageMap {
public:
    // Throws std::invalid_argument when the lists differ in length, are empty, or a size is not above zero.
    PageMap(std::vector<uint64_t> bases, std::vector<int64_t> strides, std::vector<uint64_t> page_bytes,
            int64_t num_blocks);

    size_t block_bytes() const { return block_bytes_; }

    // Throws std::out_of_range for a block id >= num_blocks, and for a negative one unless `skip_negative`.
    void check(const Blocks &blocks, bool skip_negative) const;

    // The copies below take checked blocks and run without the GIL.
    void gather(uint8_t *record, const Blocks &blocks) const;
    void scatter(const uint8_t *record, const Blocks &blocks) const;
    uint64_t scatter_verify(const uint8_t *record, size_t nbytes, uint64_t seed, const Blocks &blocks) const;

private:
    struct Layer {
        uint8_t *base;
        int64_t stride;
        size_t page_bytes;
    };
    std::vector<Layer> layers_;
    size_t block_bytes_ = 0;
    int64_t num_blocks_;
};

}  // namespace saria
