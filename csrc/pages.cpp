#include "pages.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "checksum.h"

namespace saria {

PageMap::PageMap(std::vector<uint64_t> bases, std::vector<int64_t> strides, std::vector<uint64_t> page_bytes,
                 int64_t num_blocks)
    : num_blocks_(num_blocks) {
    if (bases.empty() || bases.size() != strides.size() || bases.size() != page_bytes.size())
        throw std::invalid_argument("bases, strides and page_bytes must have one entry per layer");
    if (num_blocks <= 0) throw std::invalid_argument("num_blocks must be above zero");
    for (size_t i = 0; i < bases.size(); ++i) {
        if (page_bytes[i] == 0) throw std::invalid_argument("page_bytes must be above zero");
        layers_.push_back({reinterpret_cast<uint8_t *>(bases[i]), strides[i], page_bytes[i]});
        block_bytes_ += page_bytes[i];
    }
}

void PageMap::check(const Blocks &blocks, bool skip_negative) const {
    for (int64_t block : blocks)
        if (block >= num_blocks_ || (block < 0 && !skip_negative))
            throw std::out_of_range("block " + std::to_string(block) + " is outside 0.." +
                                    std::to_string(num_blocks_ - 1));
}

void PageMap::gather(uint8_t *record, const Blocks &blocks) const {
    for (int64_t block : blocks)
        for (const Layer &layer : layers_) {
            std::memcpy(record, layer.base + block * layer.stride, layer.page_bytes);
            record += layer.page_bytes;
        }
}

void PageMap::scatter(const uint8_t *record, const Blocks &blocks) const {
    for (int64_t block : blocks) {
        if (block < 0) {
            record += block_bytes_;
            continue;
        }
        for (const Layer &layer : layers_) {
            std::memcpy(layer.base + block * layer.stride, record, layer.page_bytes);
            record += layer.page_bytes;
        }
    }
}

uint64_t PageMap::scatter_verify(const uint8_t *record, size_t nbytes, uint64_t seed, const Blocks &blocks) const {
    // Sums one 4 KiB block while it copies it; or, where page and block are not in step, sums it, then copies what of it
    // belongs to the current page, while it is in L1.
    Checksum sum(seed);
    const uint8_t *end = record + nbytes, *at = record, *summed = record;
    for (int64_t block : blocks)
        for (const Layer &layer : layers_) {
            uint8_t *page = layer.base + block * layer.stride;
            const uint8_t *page_end = at + layer.page_bytes;
            while (at < page_end) {
                if (at == summed && block >= 0 && page_end - at >= static_cast<ptrdiff_t>(kBlockBytes) &&
                    reinterpret_cast<uintptr_t>(page) % kCopyAlignment == 0) {
                    sum.block_and_copy(at, page);
                    summed += kBlockBytes;
                    page += kBlockBytes;
                    at += kBlockBytes;
                    continue;
                }
                if (at == summed) {
                    sum.block(summed);
                    summed += kBlockBytes;
                }
                size_t piece = std::min(summed, page_end) - at;
                if (block >= 0) std::memcpy(page, at, piece);
                page += piece;
                at += piece;
            }
        }
    finish_copies();
    for (; summed < end; summed += kBlockBytes) sum.block(summed);
    return sum.finish(nbytes);
}

}  // namespace saria
